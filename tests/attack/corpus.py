"""What attacks are made of: small good things, made once, and code that spoils them."""

import io
import json
import os
import pickle
import random
import struct
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from judge import Judge
from PIL import Image

TINY = (
    *("--model.width", "0.125", "--model.projector_hidden", "8", "--model.projector_out", "8"),
    *(
        "--data.image_size",
        "8",
        "--train.batch_size",
        "4",
        "--train.steps",
        "2",
        "--train.checkpoint_every",
        "1",
    ),
    *(
        "--train.threads",
        "1",
        "--train.precision",
        "fp32",
        "--optim.warmup_epochs",
        "0",
        "--monitor.knn_every",
        "0",
    ),
    *("--monitor.log_every", "1", "--monitor.report", "false", "--eval_data.name", "none"),
)
#: A pretraining that takes half a second, on images in `photos`.
PRETRAIN = ("pretrain", "quickstart", "--method.name", "byol", *TINY, "--data.name", "folder")
PRETRAIN = (*PRETRAIN, "--data.root", "photos", "--data.cache", "off")
EMBED = ("embed", "encoder.safetensors", "--out", "found.npz", "--threads", "1", "--data.cache", "off")
#: A detector that is trained in a second, on images that are drawn.
DETECT = (
    *("detect", "--out", "detector", "--model", "retinanet", "--init", "random", "--encoder.width", "0.125"),
    *("--encoder.backbone", "resnet18", "--head.fpn_channels", "32", "--head.detections", "5"),
    *("--data.short_edges", "32", "--data.test_short_edge", "32", "--data.max_long_edge", "32"),
    *("--data.train_size", "2", "--data.test_size", "1", "--data.workers", "0", "--train.batch_size", "2"),
    *("--train.steps", "1", "--train.threads", "1", "--train.device", "cpu", "--evaluate_every", "0"),
)


def picture(seed: int = 0, side: int = 12) -> Image.Image:
    """A colored picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    return Image.fromarray(pixels)


def encoded(kind: str = "PNG", seed: int = 0, side: int = 12, mode: str = "RGB") -> bytes:
    """A picture as a file's bytes."""
    data = io.BytesIO()
    picture(seed, side).convert(mode).save(data, kind)
    return data.getvalue()


def photos(folder: Path, classes: int = 2, each: int = 6) -> Path:
    """A folder of classes of pictures."""
    for label in range(classes):
        (folder / f"class{label}").mkdir(parents=True, exist_ok=True)
        for i in range(each):
            (folder / f"class{label}" / f"{i}.png").write_bytes(encoded(seed=label * each + i))
    return folder


def make_bases(judge: Judge) -> None:
    """The good things that attacks copy: photos, a run, its encoder, a cache, an archive."""
    photos(judge.bases / "photos")
    judge.make("run", (*PRETRAIN, "--out", "run"))
    (judge.bases / "encoder.safetensors").write_bytes((judge.bases / "run/encoder.safetensors").read_bytes())
    knn = ("evaluate", "knn", "run", "--data", "photos", "--data.test_split", "-20%", "--data.split", "80%")
    knn = (*knn, "--data.image_size", "8", "--k", "1", "--floors", "false", "--threads", "1")
    judge.make("run", (*knn, "--data.cache", "off"))
    cached = (*EMBED[:-1], "on", "--data", "photos", "--data.image_size", "8", "--data.cache_dir", "cache")
    judge.make("cache", cached)
    judge.make("detector", DETECT)
    with tarfile.open(judge.bases / "photos.tar", "w") as archive:
        archive.add(judge.bases / "photos", "photos")
    with zipfile.ZipFile(judge.bases / "photos.zip", "w") as archive:
        for path in sorted((judge.bases / "photos").rglob("*.png")):
            archive.write(path, path.relative_to(judge.bases))


# -- damage


def damages(data: bytes, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of `count` ways to damage a file: cut, flipped, zeroed, grown, replaced, repeated."""
    draw = random.Random(seed)
    kinds = ("cut", "flip", "zero", "grow", "noise", "repeat", "byte")
    for i in range(count):
        kind, spoiled = kinds[i % len(kinds)], bytearray(data)
        where = draw.randrange(max(1, len(data)))
        if i >= len(kinds):  # most of what is interesting is in the beginning
            where = min(where, draw.randrange(1, 400))
        match kind:
            case "cut":
                del spoiled[where:]
            case "flip":
                spoiled[where : where + 1] = bytes([spoiled[where] ^ (1 << draw.randrange(8))])
            case "zero":
                spoiled[where : where + 16] = bytes(len(spoiled[where : where + 16]))
            case "grow":
                spoiled += draw.randbytes(64)
            case "noise":
                spoiled[where : where + 32] = draw.randbytes(len(spoiled[where : where + 32]))
            case "repeat":
                spoiled[where:where] = spoiled[where : where + 64]
            case "byte":
                spoiled[where : where + 4] = b"\xff\xff\xff\x7f"[: len(spoiled[where : where + 4])]
        yield f"{kind}-{i}", bytes(spoiled)


def sparse(path: Path, size: int = 8 << 30) -> None:
    """A file that is large and takes no room."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


#: What can stand where a file is expected; each makes it at a path.
KINDS = {
    "fifo": os.mkfifo,
    "zero": lambda path: Path(path).symlink_to("/dev/zero"),
    "sparse": sparse,
    "folder": lambda path: Path(path).mkdir(),
    "dangling": lambda path: Path(path).symlink_to("nowhere"),
    "itself": lambda path: Path(path).symlink_to(Path(path).name),
    "socket": lambda path: os.mknod(path, 0o140666),
    "empty": lambda path: Path(path).write_bytes(b""),
    "noise": lambda path: Path(path).write_bytes(random.Random(0).randbytes(5000)),
    "nul": lambda path: Path(path).write_bytes(bytes(5000)),
    "deep": lambda path: Path(path).write_bytes(b"[" * 90_000),
}


def replace_by(path: Path, kind: str) -> None:
    """Put something else where a file is."""
    path.unlink(missing_ok=True)
    KINDS[kind](path)


@cache
def stability_result() -> dict[str, Any]:
    """What `reproduce stability` would have measured with seed 0, with invented numbers."""
    from momentum2.reproduce.command import ReproduceOptions, find_study

    study = find_study(ReproduceOptions())
    instrument = study.instrument
    norms: list[tuple[str, float, int | None]] = [("local", 1.0, n) for n in instrument.samples]
    norms += [("momentum", alpha, n) for alpha in instrument.alphas for n in instrument.samples]
    norms += [("synced", 1.0, 64), ("ema", 0.0, None), ("scheduled", 0.3, 4)]
    number = {"noise": 0.1, "history": 0.1, "bias": 0.1, "signal": 0.5}
    errors = dict.fromkeys(("noise", "history", "bias", "sum", "signal"), 0.01)
    points = [
        {
            "share": share,
            "step": 5,
            "norm": norm,
            "alpha": alpha,
            "samples": n,
            "age": 1.0,
            **number,
            "errors": errors,
        }
        for share in instrument.shares
        for norm, alpha, n in norms
    ]
    told = {"seed": 0, "images": 1280, "steps": 20, "cpu_seconds": 1.0, "points": points}
    found: dict[str, Any] = json.loads(json.dumps({"settings": study.settings, "environment": {}, **told}))
    return found


# -- files that are valid and hostile


def postscript(command: str = "gs") -> bytes:
    """An EPS file; Pillow opens it by starting Ghostscript."""
    return (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\n%%EndComments\n"
        b"newpath 0 0 moveto 12 12 lineto stroke\nshowpage\n%%EOF\n"
    )


def planted_program(folder: Path, name: str) -> None:
    """A program that leaves a canary when it is run."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text('#!/bin/sh\n: > "$CANARY"\nexit 1\n')
    (folder / name).chmod(0o755)


def planted_module(folder: Path, name: str) -> None:
    """A module that leaves a canary when it is imported."""
    (folder / f"{name}.py").write_text(
        'import os\nopen(os.environ["CANARY"], "w").close()\nclass X:\n    pass\n'
    )


class Bomb:
    """Leaves a canary when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (': > "$CANARY"',)


def pickled_bomb() -> bytes:
    return pickle.dumps(Bomb())


def safetensors_file(header: bytes, tensors: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    return struct.pack("<Q", len(header)) + header + tensors


def safetensors_headers() -> dict[str, bytes]:
    """Hostile headers by name."""
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    return {
        "empty": b"",
        "not-json": b"{]",
        "list": b"[]",
        "deep": b"[" * 50_000,
        "deep-table": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        "negative": json.dumps({"a": one | {"shape": [-1]}}).encode(),
        "huge-shape": json.dumps({"a": one | {"shape": [2**62, 4]}}).encode(),
        "beyond": json.dumps({"a": one | {"data_offsets": [0, 1 << 40]}}).encode(),
        "backward": json.dumps({"a": one | {"data_offsets": [4, 0]}}).encode(),
        "dtype": json.dumps({"a": one | {"dtype": "X99"}}).encode(),
        "float-shape": json.dumps({"a": one | {"shape": [1.5]}}).encode(),
        "metadata-list": json.dumps({"__metadata__": [1], "a": one}).encode(),
        "metadata-number": json.dumps({"__metadata__": {"a": 1}, "a": one}).encode(),
        "name-esc": json.dumps({"\x1b[31mFORGED": one}).encode(),
        "name-newline": json.dumps({"a\nFORGED": one}).encode(),
        "name-long": json.dumps({"a" * 50_000: one}).encode(),
        "many": json.dumps(
            {str(i): one | {"shape": [0], "data_offsets": [0, 0]} for i in range(2000)}
        ).encode(),
        "digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
        "nan": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
        "twice": b'{"a":%s,"a":%s}' % ((json.dumps(one).encode(),) * 2),
        "utf8": b'{"\xff\xfe":1}',
    }


def tar_header(name: bytes = b"a.png", size: bytes = b"00000000010\0", kind: bytes = b"0") -> bytes:
    """The header of a tar's member, with a right checksum."""
    header = bytearray(512)
    header[: len(name)] = name[:100]
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124:136], header[136:148], header[156:157] = size, b"00000000000\0", kind
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def pax(records: bytes) -> bytes:
    """A tar whose first member has these extended headers."""
    padded = records + bytes(-len(records) % 512)
    body = encoded()
    size = b"%011o\0" % len(body)
    return (
        tar_header(b"pax", b"%011o\0" % len(records), b"x")
        + padded
        + tar_header(size=size)
        + body
        + bytes(-len(body) % 512 + 1024)
    )


def pax_record(key: bytes, value: bytes) -> bytes:
    length = len(key) + len(value) + 3
    total = length + len(str(length))
    total = length + len(str(total))
    return b"%d %s=%s\n" % (total, key, value)


def hostile_tars() -> dict[str, bytes]:
    """Archives that are odd in their headers."""
    body = encoded()
    good = tar_header(size=b"%011o\0" % len(body)) + body + bytes(-len(body) % 512)
    end = bytes(1024)
    return {
        "size-base256": tar_header(size=b"\x80" + b"\xff" * 11) + end,
        "size-huge": tar_header(size=b"\x80\0\0\0\x7f" + b"\xff" * 7) + end,
        "size-negative": tar_header(size=b"\xff" * 12) + end,
        "size-octal": tar_header(size=b"77777777777\0") + end,
        "size-text": tar_header(size=b"abcdefghijk\0") + end,
        "pax-size-text": pax(pax_record(b"size", b"abc")),
        "pax-size-huge": pax(pax_record(b"size", b"9" * 30)),
        "pax-size-negative": pax(pax_record(b"size", b"-1")),
        "pax-digits": pax(pax_record(b"size", b"9" * 5000)),
        "pax-length": pax(b"99999999999999999999 a=b\n"),
        "pax-length-zero": pax(b"0 a=b\n"),
        "pax-sparse": pax(pax_record(b"GNU.sparse.map", b"1,2,x")),
        "pax-sparse-huge": pax(
            pax_record(b"GNU.sparse.size", b"9" * 20) + pax_record(b"GNU.sparse.numblocks", b"1")
        ),
        "pax-sparse-10": pax(pax_record(b"GNU.sparse.major", b"1") + pax_record(b"GNU.sparse.minor", b"0")),
        "pax-name": pax(pax_record(b"path", b"\x1b[31m\nFORGED.png")),
        "pax-mtime": pax(pax_record(b"mtime", b"nan")),
        "pax-charset": pax(pax_record(b"hdrcharset", b"BINARY") + pax_record(b"path", b"\xff.png")),
        "gnu-sparse": tar_header(kind=b"S") + end,
        "long-name": tar_header(b"././@LongLink", b"%011o\0" % 600, b"L")
        + b"a" * 600
        + bytes(424)
        + good
        + end,
        "long-name-huge": tar_header(b"././@LongLink", b"77777777777\0", b"L") + end,
        "link-itself": tar_header(kind=b"1") + end,
        "link-loop": tar_header(b"a.png", kind=b"1") + tar_header(b"b.png", kind=b"1") + end,
        "fifo": tar_header(kind=b"6") + end,
        "device": tar_header(kind=b"3") + end,
        "contiguous": tar_header(kind=b"7", size=b"%011o\0" % len(body))
        + body
        + bytes(-len(body) % 512)
        + end,
        "up": tar_header(b"../../victims/secret.png", b"%011o\0" % len(body))
        + body
        + bytes(-len(body) % 512)
        + end,
        "absolute": tar_header(b"/etc/passwd.png", b"%011o\0" % len(body))
        + body
        + bytes(-len(body) % 512)
        + end,
        "twice": good + good + end,
        "no-end": good,
        "cut": good[:700],
        "checksum": good[:148] + b"1234567\0" + good[156:] + end,
        "gzip": b"\x1f\x8b\x08" + bytes(100),
        "many": b"".join(tar_header(b"%d.png" % i, b"%011o\0" % 0) for i in range(3000)) + end,
    }


def zip_bomb(size: int) -> bytes:
    """A zip with one member that inflates to `size` zeros."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        with archive.open("a/bomb.png", "w", force_zip64=True) as member:
            for _ in range(size >> 20):
                member.write(bytes(1 << 20))
        archive.writestr("a/good.png", encoded())
        archive.writestr("b/good.png", encoded(seed=1))
    return data.getvalue()


def cifar_pickles() -> dict[str, bytes]:
    """Batches that are not what they say."""
    frame = b"\x80\x04\x95" + struct.pack("<Q", 1 << 40)
    return {
        "bomb": pickled_bomb(),
        "frame": frame,
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40),
        "bytes8": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40),
        "text8": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40),
        "long": b"\x80\x02\x8b" + struct.pack("<i", 1 << 30),
        "memo": b"\x80\x02j\xff\xff\xff\x7f.",
        "put": b"\x80\x02Nr\xff\xff\xff\x7f.",
        "list": pickle.dumps([1, 2]),
        "empty-table": pickle.dumps({}),
        "number": pickle.dumps(3),
        "deep": b"(" * 50_000,
        "nested": b"]" * 20_000 + b"a" * 19_999 + b".",
        "global": b"cos\nsystem\n(S'true'\ntR.",
        "ext": b"\x80\x02\x82\x01.",
        "persistent": b"Pabc\n.",
        "float-data": pickle.dumps({"data": [1.5], "labels": [0]}),
        "text-labels": pickle.dumps({"data": b"abc", "labels": "abc"}),
        "huge-label": pickle.dumps({"data": b"", "labels": [10**30]}),
        "empty": b"",
    }
