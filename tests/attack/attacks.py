"""The attacks, by the fifteen doors they try: a group is a function that yields cases."""

import dataclasses
import hashlib
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from corpus import (
    EMBED,
    KINDS,
    PRETRAIN,
    cifar_pickles,
    damages,
    encoded,
    hostile_tars,
    photos,
    pickled_bomb,
    picture,
    planted_module,
    planted_program,
    postscript,
    replace_by,
    safetensors_file,
    safetensors_headers,
    sparse,
    zip_bomb,
)
from judge import FORGED, Case, Facts, Place
from PIL import Image

from momentum2.config import Config
from momentum2.settings import _kinds, leaves

CAUSES = {
    "C1": "a config imports code",
    "C2": "YAML without bounds",
    "C3": "errors of the system and of memory",
    "C4": "an image starts a program, warns or swells",
    "C5": "writes through planted links",
    "C6": "reads of what is not a bounded file",
    "C7": "JSON of others",
    "C8": "text from outside on the terminal",
    "C9": "numbers without a ceiling",
    "C10": "weights that do not fit or do not end",
    "C11": "a cache that is believed",
    "C12": "results",
    "C13": "processes that differ",
    "C14": "watch",
    "C15": "folders, archives, lists, CIFAR, COCO",
}
GROUPS: list[Callable[[], Iterator[Case]]] = []


def group(function: Callable[[], Iterator[Case]]) -> Callable[[], Iterator[Case]]:
    GROUPS.append(function)
    return function


def write(name: str, data: bytes | str) -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        path = place.case / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogateescape"))

    return prepare


def copies(*names: str) -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        for name in names:
            place.copy(name)

    return prepare


def _replaced(name: str, kind: str, place: Place) -> None:
    replace_by(place.case / name, kind)


def both(*steps: Callable[[Place], object]) -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        for step in steps:
            step(place)

    return prepare


PLAN = ("plan", "quickstart", "--images", "1000")
CONFIGURED = (*PLAN, "--config", "given.yaml")
KNN = ("evaluate", "knn", "run", "--data", "photos", "--data.split", "80%", "--data.test_split", "-20%")
KNN = (
    *KNN,
    "--data.image_size",
    "8",
    "--k",
    "1",
    "--floors",
    "false",
    "--threads",
    "1",
    "--data.cache",
    "off",
)
ON_RUN: dict[str, tuple[str, ...]] = {
    "report": ("report", "run", "--points", "3"),
    "knn": KNN,
    "embed": (
        "embed",
        "run",
        "--data",
        "photos",
        "--data.image_size",
        "8",
        "--out",
        "found.npz",
        "--threads",
        "1",
    ),
    "export": ("export", "run", "--format", "torchvision", "--out", "exported"),
    "resume": (*PRETRAIN, "--out", "run", "--train.steps", "3"),
}
RUN = copies("run", "photos")


# -- C1


@group
def imports_from_settings() -> Iterator[Case]:
    texts = {"class_path: planted.X", "{class_path: planted.X, init_args: {}}", "dict_kwargs: {a: planted.X}"}
    for section in ("method", "model", "data", "train", "optim", "views", "monitor", "objects", "eval_data"):
        for i, text in enumerate(sorted(texts)):
            value = text if text.startswith("{") else f"{{{text}}}"
            prepare = both(partial(_plant, "planted"), write("given.yaml", f"{section}: {value}\n"))
            yield Case("C1", f"file-{section}-{i}", CONFIGURED, prepare, codes=frozenset({2}))
    for i, words in enumerate(
        [
            ("--train", '{"class_path": "planted.X"}'),
            ("--train", "planted.X"),
            ("--train.class_path", "planted.X"),
            ("--model.backbone", "planted.X"),
            ("--model.backbone", "planted"),
            ("--method.name", "planted.X"),
            ("--config", '{"train": {"class_path": "planted.X"}}'),
            ("--objects.method", "planted.X"),
            ("--model.weights", "planted.py"),
            ("--train.device", "planted.X"),
        ]
    ):
        yield Case("C1", f"flag-{i}", (*PLAN, *words), partial(_plant, "planted"), codes=frozenset({0, 2}))
    for name, words in ON_RUN.items():
        for section in ("train", "objects", "model"):

            def spoil(place: Place, section: str = section) -> None:
                config = place.case / "run" / "config.yaml"
                config.write_text(config.read_text() + f"\n{section}2: {{class_path: planted.X}}\n")
                planted_module(place.case, "planted")

            yield Case("C1", f"run-{name}-{section}", words, both(RUN, spoil))

        def objects(place: Place) -> None:
            config = place.case / "run" / "config.yaml"
            tree = yaml.safe_load(config.read_text())
            tree["objects"] = {"method": "planted.X", "encoder": "planted.X", "dataset": "planted.X"}
            config.write_text(yaml.safe_dump(tree))
            planted_module(place.case, "planted")

        yield Case("C1", f"run-{name}-recorded", words, both(RUN, objects))


def _plant(name: str, place: Place) -> None:
    planted_module(place.case, name)


# -- C2


@group
def nested_yaml() -> Iterator[Case]:
    for opening in (
        "[",
        "{",
        "- ",
        "? ",
        "{a: ",
        "a: {b: ",
        '"',
        "'",
        "|\n ",
        "!!a ",
        "&a ",
        "*",
        "--- ",
        "%",
        "`",
    ):
        for count in (7, 500, 20_000):
            text = opening * min(count, 99_000 // len(opening))
            name = f"nested-{opening.strip().replace(' ', '').replace(chr(10), '')}-{count}"
            yield Case(
                "C2", name, CONFIGURED, write("given.yaml", text), codes=frozenset({2}), cpu=3, memory=150
            )
    for width in (2, 9, 100):
        lines = ["a0: &a0 [x, x]"] + [
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, 12)
        ]
        text = "\n".join(lines)
        yield Case(
            "C2", f"aliases-{width}", CONFIGURED, write("given.yaml", text), codes=frozenset({2}), cpu=3
        )
    for i, text in enumerate(["&a [*a]", "a: &a {b: *a}", "train: &t {<<: *t}", "<<: {train: {seed: 1}}"]):
        yield Case("C2", f"itself-{i}", CONFIGURED, write("given.yaml", text), cpu=3, memory=150)


@group
def tagged_yaml() -> Iterator[Case]:
    tags = ["!!int", "!!float", "!!python/object:os.system", "!!python/name:os.system", "!!binary", "!!set"]
    tags += [
        "!!timestamp",
        "!!bool",
        "!!null",
        "!!omap",
        "!x",
        "!!python/object/apply:os.system",
        "!!str",
        "!<x>",
    ]
    for tag in tags:
        for value in ("x", "[]", "{}"):
            name = f"tag-{tag.strip('!').replace('/', '-')}-{value}"
            yield Case("C2", name, CONFIGURED, write("given.yaml", f"train: {{seed: {tag} {value}}}"), cpu=3)


@group
def yaml_files() -> Iterator[Case]:
    texts: dict[str, bytes] = {
        "empty": b"",
        "space": b"  \n\n",
        "comment": b"# nothing\n",
        "nul": b"train: {seed: \0}",
        "bom": b"\xef\xbb\xbftrain: {seed: 1}",
        "utf16": "train: {seed: 1}".encode("utf-16"),
        "utf32": "train: {seed: 1}".encode("utf-32"),
        "latin1": b"train: {seed: \xe9}",
        "surrogate": b"train: {seed: \xed\xa0\x80}",
        "esc": b"train: {seed: \x1b[31m}",
        "c1": "train: {seed: \x9b31m}".encode(),
        "nel": "train:\x85  seed: 1".encode(),
        "ls": "train:\u2028  seed: 1".encode(),
        "bidi": "train: {seed: \u202e1}".encode(),
        "escaped": b'train: {seed: "\\x1b[31m\\nFORGED\\u2028"}',
        "escaped-name": b'train: {"\\x1b[31m\\nFORGED": 1}',
        "long-name": b"train: {" + b"a" * 90_000 + b": 1}",
        "long-value": b"train: {seed: " + b"a" * 90_000 + b"}",
        "digits": b"train: {seed: " + b"9" * 5000 + b"}",
        "digits-float": b"optim: {lr: " + b"9" * 5000 + b"}",
        "hex": b"optim: {lr: 0x" + b"f" * 5000 + b"}",
        "octal": b"train: {seed: 0o777}",
        "binary": b"train: {seed: 0b111}",
        "sexagesimal": b"train: {seed: 1:30:00}",
        "exponent": b"optim: {lr: 1e999999999}",
        "large": b"# " + b"x" * 200_000,
        "many": b"\n".join(b"a%d: 1" % i for i in range(8_000)),
        "twice": b"train: {seed: 1, seed: 2}",
        "two-documents": b"train: {seed: 1}\n---\ntrain: {seed: 2}",
        "tabs": b"train:\n\tseed: 1",
        "percent": b"%YAML 9.9\n---\ntrain: {seed: 1}",
        "list": b"- train",
        "text": b"train",
        "complex-key": b"? [a, b]\n: 1",
        "dots": b"train.seed.x.y.z: 1",
        "dot": b".: 1",
        "none-key": b"~: 1",
        "merge": b"train: {<<: {seed: 1}}",
    }
    for name, data in texts.items():
        yield Case("C2", f"file-{name}", CONFIGURED, write("given.yaml", data), cpu=4, memory=150)
    for kind in KINDS:
        prepare = partial(_replaced, "given.yaml", kind)
        yield Case("C2", f"kind-{kind}", CONFIGURED, prepare, codes=frozenset({2}), cpu=3, memory=150)
    for name, path in {
        "stdin": "/dev/stdin",
        "fd": "/proc/self/fd/0",
        "mem": "/proc/self/mem",
        "tty": "/dev/tty",
    }.items():
        yield Case("C2", f"device-{name}", (*PLAN, "--config", path), codes=frozenset({2}), cpu=3, memory=150)
    for i in range(60):
        data = random.Random(i).randbytes(300)
        yield Case("C2", f"noise-{i}", CONFIGURED, write("given.yaml", data), codes=frozenset({2}), cpu=3)


_ODD_VALUES = [
    "null",
    "[]",
    "{}",
    "[[1]]",
    "{a: 1}",
    "x",
    ".nan",
    "-.inf",
    "''",
    "2020-01-01",
    "9" * 30,
    "true",
]


@group
def sections_of_other_types() -> Iterator[Case]:
    for section in (field.name for field in dataclasses.fields(Config)):
        for i, value in enumerate([*_ODD_VALUES, "!!set {a}", "1", "'1'"]):
            text = f"{section}: {value}\n"
            yield Case("C2", f"section-{section}-{i}", CONFIGURED, write("given.yaml", text), cpu=4)


@group
def settings_of_other_types() -> Iterator[Case]:
    for name in leaves(Config):
        section, _, key = name.partition(".")
        for i, value in enumerate(_ODD_VALUES):
            text = f"{section}: {{{key}: {value}}}\n"
            yield Case("C2", f"setting-{name}-{i}", CONFIGURED, write("given.yaml", text), cpu=6)


# -- C3


_LONG = "a" * 300
_PATHS = {
    "long": _LONG,
    "long-path": "/".join(["a" * 200] * 30),
    "loop": "loop/x",
    "closed": "closed/x",
    "unreadable": "unreadable",
    "file": "file/x",
    "folder": "folder",
    "home": "~nosuchuser/x",
    "root": "/proc",
    "proc": "/proc/self/x",
    "empty": "",
    "dot": ".",
    "up": "../" * 50 + "proc/nowhere",
    "null": "null",
    "full": "full",
    "stdout": "/proc/self/fd/1",
    "newline": f"a\n{FORGED}",
    "bytes": "\udcff\udcfe",
}


def _odd_paths(place: Place) -> None:
    case = place.case
    (case / "loop").symlink_to("loop")
    (case / "closed").mkdir()
    (case / "file").write_text("text")
    (case / "folder").mkdir()
    (case / "unreadable").write_text("text")
    (case / "unreadable").chmod(0)
    (case / "closed").chmod(0)
    for name, number in {
        "null": 3,
        "full": 7,
    }.items():  # of its own: those of the machine must not be at risk
        if os.getuid() == 0:
            os.mknod(case / name, 0o020666, os.makedev(1, number))
        else:
            (case / name).symlink_to(f"/dev/{name}")


def _devices_stay(place: Place, facts: Facts) -> str | None:
    """Whoever writes to a device does not put a file in its place."""
    gone = [name for name in ("null", "full") if not (place.case / name).is_char_device()]
    return f"there is no device {gone[0]} any more" if gone else None


_PATH_OPTIONS: dict[str, tuple[str, ...]] = {
    "config": (*PLAN, "--config"),
    "root": ("plan", "quickstart", "--data.name", "folder", "--data.root"),
    "imagenet": ("plan", "quickstart", "--data.name", "imagenet", "--data.root"),
    "archive": ("plan", "quickstart", "--data.name", "archive", "--data.root"),
    "list": ("plan", "quickstart", "--data.name", "list", "--data.root"),
    "cifar10": ("plan", "quickstart", "--data.name", "cifar10", "--data.root"),
    "stl10": ("plan", "quickstart", "--data.name", "stl10", "--data.root"),
    "out": (*PRETRAIN, "--out"),
    "weights": (*PRETRAIN, "--out", "new", "--model.weights"),
    "cache": (*PRETRAIN[:-1], "on", "--out", "new", "--data.cache_dir"),
    "report": ("report",),
    "report-out": ("report", "run", "--points", "3", "--out"),
    "watch": ("watch",),
    "knn": ("evaluate", "knn"),
    "data": ("evaluate", "knn", "run", "--data"),
    "embed-out": (*EMBED[:2], "--data", "photos", "--out"),
    "semi-list": ("evaluate", "semi", *KNN[2:-7], "--list"),
    "linear-out": ("evaluate", "linear", *KNN[2:-8], "--floors", "false", "--epochs", "1", "--out"),
    "export": ("export", "--format", "torchvision", "--out", "exported"),
    "export-out": ("export", "encoder.safetensors", "--format", "torchvision", "--out"),
    "views": ("views",),
    "views-out": ("views", "photos", "--count", "2", "--out"),
    "detect": ("detect", "--eval_only", "true"),
    "detect-root": ("detect", "encoder.safetensors", "--out", "new", "--data.name", "coco", "--data.root"),
    "reproduce": ("reproduce", "alpha", "--dry_run", "true", "--out"),
}


@group
def odd_paths() -> Iterator[Case]:
    bases = copies("run", "photos", "encoder.safetensors")
    for option, words in _PATH_OPTIONS.items():
        for name, path in _PATHS.items():
            given = (*words, path)
            yield Case(
                "C3",
                f"path-{option}-{name}",
                given,
                both(bases, _odd_paths),
                cpu=12,
                memory=700,
                powerless=True,
                check=_devices_stay,
            )


@group
def few_files_and_little_room() -> Iterator[Case]:
    for count in (12, 20, 40):
        for name, words in ON_RUN.items():
            yield Case(
                "C3", f"files-{name}-{count}", words, RUN, limits={"NOFILE": count}, cpu=20, memory=900
            )
    for name, words in ON_RUN.items():
        for megabytes in (1, 40):
            limits = {"AS": megabytes << 20}
            yield Case("C3", f"memory-{name}-{megabytes}", words, RUN, limits=limits, cpu=20, memory=900)
        limits = {"FSIZE": 4096}
        yield Case("C3", f"file-size-{name}", words, RUN, limits=limits, cpu=20, memory=900)
    full = {
        "pretrain": (*PRETRAIN, "--out", "disk/run"),
        "embed": ("embed", "run", "--data", "photos", "--data.image_size", "8", "--out", "disk/a.npz"),
        "report": ("report", "run", "--points", "3", "--out", "disk/report.html"),
        "views": ("views", "photos", "--count", "8", "--out", "disk/views.png"),
        "export": ("export", "run", "--format", "torchvision", "--out", "disk/exported"),
        "cache": (*PRETRAIN[:-1], "on", "--out", "new", "--data.cache_dir", "disk/cache"),
    }
    for name, words in full.items():
        for size in ("4k", "16k", "64k", "256k"):
            yield Case("C3", f"full-{name}-{size}", words, RUN, disk=size, cpu=20, memory=900)


# -- C4


def _among_photos(name: str, data: bytes, place: Place) -> None:
    folder = place.copy("photos")
    (folder / "class0" / name).write_bytes(data)


_EMBED_PHOTOS = (*EMBED, "--data", "photos", "--data.image_size", "8", "--data.max_bad_fraction", "0.5")


_TOLERANT = (*PRETRAIN, "--out", "new", "--data.max_bad_fraction", "0.5")


@group
def pictures_that_start_programs() -> Iterator[Case]:
    for suffix in (".jpg", ".png", ".tif", ".gif", ".bmp", ".webp", ".ppm", ".jp2", ".tga", ".avif"):
        for command in ("embed", "pretrain"):
            words = (
                _EMBED_PHOTOS
                if command == "embed"
                else (*PRETRAIN, "--out", "new", "--data.max_bad_fraction", "0.5")
            )

            def prepare(place: Place, suffix: str = suffix) -> None:
                _among_photos(f"0a{suffix}", postscript(), place)
                place.copy("encoder.safetensors")
                for program in ("gs", "gswin32c", "ghostscript", "convert", "display"):
                    planted_program(place.case / "bin", program)

            path = f"bin:{os.environ.get('PATH', '')}"
            yield Case(
                "C4", f"postscript-{command}{suffix}", words, prepare, environment={"PATH": path}, cpu=12
            )


@group
def pictures_of_other_formats() -> Iterator[Case]:
    """Formats that Pillow writes and we do not name, under names that we read."""
    for kind in (
        "PCX",
        "SGI",
        "ICO",
        "ICNS",
        "DDS",
        "MPO",
        "MSP",
        "SPIDER",
        "XBM",
        "PDF",
        "BLP",
        "QOI",
        "DIB",
    ):
        try:
            mode = {"MSP": "1", "XBM": "1", "SPIDER": "F", "BLP": "P"}.get(kind, "RGB")
            data = encoded(kind, side=16, mode=mode)
        except (KeyError, OSError, ValueError):
            continue
        prepare = both(partial(_among_photos, "0a.png", data), copies("encoder.safetensors"))
        yield Case("C4", f"format-{kind}", _EMBED_PHOTOS, prepare, cpu=12)


@group
def damaged_pictures() -> Iterator[Case]:
    kinds = {
        "jpg": "JPEG",
        "png": "PNG",
        "gif": "GIF",
        "bmp": "BMP",
        "webp": "WEBP",
        "tif": "TIFF",
        "ppm": "PPM",
    }
    kinds |= {"jp2": "JPEG2000", "tga": "TGA", "avif": "AVIF"}
    for suffix, kind in kinds.items():
        try:
            data = encoded(kind, side=24)
        except (KeyError, OSError):
            continue
        for name, spoiled in damages(data, 14, seed=len(suffix)):
            prepare = both(partial(_among_photos, f"0a.{suffix}", spoiled), copies("encoder.safetensors"))
            yield Case("C4", f"damaged-{suffix}-{name}", _EMBED_PHOTOS, prepare, cpu=12)


@group
def odd_pictures() -> Iterator[Case]:
    exif = Image.Exif()
    exif[0x0112] = 6
    good = io.BytesIO()
    picture().save(good, "JPEG", exif=exif)
    jpeg = good.getvalue()
    start = jpeg.index(b"Exif\0\0")
    odd: dict[str, bytes] = {
        "empty.png": b"",
        "exif-cut.jpg": jpeg[: start + 8] + bytes(20) + jpeg[start + 28 :],
        "exif-noise.jpg": jpeg[: start + 6] + random.Random(0).randbytes(20) + jpeg[start + 26 :],
        "exif-offset.jpg": jpeg[: start + 10] + b"\xff\xff\xff\xff" + jpeg[start + 14 :],
        "icc.png": _png_with(b"iCCP", b"x\0\0" + random.Random(1).randbytes(50)),
        "text-bomb.png": _png_with(b"zTXt", b"k\0\0" + __import__("zlib").compress(bytes(80 << 20))),
        "palette.png": _png_with(b"PLTE", b"\0" * 769),
        "trns.png": _png_with(b"tRNS", b"\0" * 999),
        "huge-size.png": _resized_png(1 << 30, 1 << 30),
        "bomb-size.png": _resized_png(60_000, 60_000),
        "wide.png": _resized_png(1 << 20, 1),
        "zero.png": _resized_png(0, 5),
        "huge.ppm": b"P6\n999999 999999\n255\n",
        "text.ppm": b"P3\n3 3\n255\n" + b"9" * 500,
        "comment.ppm": b"P6\n#" + b"x" * 100_000 + b"\n3 3\n255\n" + bytes(27),
        "huge.bmp": b"BM" + bytes(16) + b"\xff\xff\xff\x7f\xff\xff\xff\x7f" + bytes(40),
        "huge.tga": bytes([0, 0, 10]) + bytes(9) + b"\xff\xff\xff\xff" + bytes([24, 0]) + bytes(10),
        "gif-frames.gif": encoded("GIF")[:-1] * 40,
        "tiff-loop.tif": b"II*\0\x08\0\0\0" + b"\0\0" + b"\x08\0\0\0",
        "tiff-tags.tif": b"II*\0\x08\0\0\0" + b"\xff\xff" + b"\x00\x01\x04\0\xff\xff\xff\xff\0\0\0\0" * 2000,
        "fits.png": b"SIMPLE  =                    T" + bytes(3000),
        "mpeg.jpg": b"\x00\x00\x01\xb3" + bytes(100),
        "wmf.png": b"\xd7\xcd\xc6\x9a" + bytes(200),
    }
    for name, data in odd.items():
        prepare = both(partial(_among_photos, f"0{name}", data), copies("encoder.safetensors"))
        yield Case("C4", f"odd-{name}", _EMBED_PHOTOS, prepare, cpu=12, memory=500)


def _chunk(kind: bytes, data: bytes) -> bytes:
    import zlib

    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def _png_with(kind: bytes, data: bytes) -> bytes:
    good = encoded("PNG")
    return good[:33] + _chunk(kind, data) + good[33:]


def _resized_png(width: int, height: int) -> bytes:
    good = encoded("PNG")
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + good[24:29]
    return good[:8] + _chunk(b"IHDR", header) + good[33:]


# -- C5


_RUN_FILES = (
    *(
        ".lock",
        "plan.txt",
        "plan.json",
        "metrics.jsonl",
        "metrics.tmp",
        "config.yaml.tmp",
        ".tmp-encoder.safetensors",
    ),
    *(
        "encoder.safetensors",
        "results.json",
        "results.json.tmp",
        "results.tmp",
        "report.html",
        "bad_images.txt",
    ),
    *("config.yaml", ".tmp-encoder", "encoder.tmp", "report.html.tmp", "detections.json", "predictions.png"),
)


@group
def planted_links() -> Iterator[Case]:
    for name in _RUN_FILES:
        for to in ("file.txt", "new.txt"):

            def plant(place: Place, name: str = name, to: str = to) -> None:
                path = place.case / "run" / name
                if path.exists():
                    path.unlink()
                path.symlink_to(place.victims / to)

            for command in ("knn", "report", "resume"):
                yield Case(
                    "C5", f"link-{command}-{name}-{to}", ON_RUN[command], both(RUN, plant), cpu=15, memory=700
                )

            def fresh(place: Place, name: str = name, to: str = to) -> None:
                place.copy("photos")
                (place.case / "new").mkdir()
                (place.case / "new" / name).symlink_to(place.victims / to)

            words = (*PRETRAIN, "--out", "new")
            yield Case("C5", f"link-pretrain-{name}-{to}", words, fresh, cpu=15, memory=700)
    for name in ("found.npz", ".tmp-found.npz", "found.npz.tmp"):

        def beside(place: Place, name: str = name) -> None:
            (place.case / name).symlink_to(place.victims / "file.txt")

        yield Case("C5", f"link-embed-{name}", ON_RUN["embed"], both(RUN, beside), cpu=12)

    def bad_image(place: Place) -> None:
        _among_photos("0a.png", b"not a picture", place)
        (place.case / "new").mkdir()
        (place.case / "new" / "bad_images.txt").symlink_to(place.victims / "file.txt")

    words = (*PRETRAIN, "--out", "new", "--data.max_bad_fraction", "0.5")
    yield Case("C5", "link-bad-images-used", words, bad_image, cpu=12)
    for suffix in (".lock", ".building", ""):

        def cached(place: Place, suffix: str = suffix) -> None:
            folder = next(path for path in (place.bases / "cache").iterdir() if path.is_dir())
            place.copy("photos")
            (place.case / "cache").mkdir()
            target = "folder" if suffix != ".lock" else "file.txt"
            (place.case / "cache" / (folder.name + suffix)).symlink_to(place.victims / target)
            place.copy("encoder.safetensors")

        words = (*EMBED[:-1], "on", "--data", "photos", "--data.image_size", "8", "--data.cache_dir", "cache")
        yield Case("C5", f"link-cache{suffix or '-folder'}", words, cached, cpu=12)


# -- C6


_READ = {
    "config.yaml": ("report", "knn", "embed", "export", "resume"),
    "encoder.safetensors": ("report", "knn", "embed", "export"),
    "metrics.jsonl": ("report", "resume"),
    "results.json": ("report", "knn"),
    "plan.txt": ("report",),
    "plan.json": ("report",),
    "bad_images.txt": ("report", "resume"),
    ".lock": ("resume",),
    "checkpoints/step-00000002/state.json": ("resume", "report"),
    "checkpoints/step-00000002/manifest.json": ("resume",),
    "checkpoints/step-00000002/model.safetensors": ("resume",),
}


@group
def other_kinds_of_files() -> Iterator[Case]:
    for name, commands in _READ.items():
        for command in commands:
            for kind in KINDS:

                def prepare(place: Place, name: str = name, kind: str = kind) -> None:
                    RUN(place)
                    path = place.case / "run" / name
                    if path.parent.name.startswith("step-"):
                        newest = max((place.case / "run" / "checkpoints").glob("step-*"))
                        path = newest / path.name
                        if not path.exists():
                            path = next(iter(sorted(newest.iterdir())))
                    replace_by(path, kind)

                yield Case(
                    "C6",
                    f"kind-{command}-{name.replace('/', '-')}-{kind}",
                    ON_RUN[command],
                    prepare,
                    cpu=15,
                    memory=600,
                )
    for kind in KINDS:
        for name, words in {
            "weights": (*PRETRAIN, "--out", "new", "--model.weights", "given.safetensors"),
            "pth": (*PRETRAIN, "--out", "new", "--model.weights", "given.pth"),
            "subject": ("embed", "given.safetensors", *EMBED[2:], "--data", "photos"),
            "list": ("plan", "quickstart", "--data.name", "list", "--data.root", "given.txt"),
            "tar": ("plan", "quickstart", "--data.name", "archive", "--data.root", "given.tar"),
            "zip": ("embed", "encoder.safetensors", *EMBED[2:], "--data", "given.zip"),
            "semi": ("evaluate", "semi", *KNN[2:-7], "--list", "given.txt", "--epochs", "1"),
        }.items():

            def given(place: Place, kind: str = kind, words: tuple[str, ...] = words) -> None:
                copies("photos", "encoder.safetensors", "run")(place)
                target = next(word for word in words if word.startswith("given."))
                replace_by(place.case / target, kind)

            yield Case("C6", f"given-{name}-{kind}", words, given, cpu=12, memory=600)


# -- C7


_JSON_VALUES: list[Any] = [
    None,
    [],
    {},
    "x",
    True,
    -1,
    1.5,
    float("nan"),
    float("inf"),
    10**30,
    [[[]]],
    "\x1b[31m\nFORGED",
]


@group
def metrics_of_others() -> Iterator[Case]:
    lines = [json.dumps(value) for value in _JSON_VALUES]
    lines += [json.dumps({"step": value, "loss": 1.0}) for value in _JSON_VALUES]
    lines += [json.dumps({"step": 1, "loss": value}) for value in _JSON_VALUES]
    lines += [json.dumps({"step": 1, "alarm": value}) for value in _JSON_VALUES]
    lines += [json.dumps({"step": 1, "knn": value, "lr": value}) for value in _JSON_VALUES]
    lines += [
        "[" * 5000,
        "9" * 5000,
        '{"step": ' + "9" * 5000 + "}",
        "{" * 100,
        '{"step": 1',
        "\0",
        "\ufeff{}",
        "{}{}",
    ]
    for i, line in enumerate(lines):

        def prepare(place: Place, line: str = line) -> None:
            RUN(place)
            path = place.case / "run" / "metrics.jsonl"
            path.write_text(line + "\n" + path.read_text() + line + "\n")

        for command in ("report", "resume"):
            yield Case("C7", f"metrics-{command}-{i}", ON_RUN[command], prepare, cpu=15, memory=700)


@group
def results_of_others() -> Iterator[Case]:
    whole: list[str] = [json.dumps(value) for value in _JSON_VALUES]
    whole += [json.dumps({"a": value}) for value in _JSON_VALUES]
    for key in ("accuracy", "floors", "settings", "data", "network", "evaluation"):
        whole += [f"REPLACE {key} {json.dumps(value)}" for value in _JSON_VALUES]
    whole += ["[" * 5000, '{"a": ' + "9" * 5000 + "}", '{"a":' * 5000]
    for i, text in enumerate(whole):

        def prepare(place: Place, text: str = text) -> None:
            RUN(place)
            path = place.case / "run" / "results.json"
            if text.startswith("REPLACE"):
                _, key, value = text.split(" ", 2)
                results = json.loads(path.read_text())
                for entry in results.values():
                    entry[key] = json.loads(value)
                text = json.dumps(results)
            path.write_text(text)

        for command in ("report", "knn"):
            yield Case("C7", f"results-{command}-{i}", ON_RUN[command], prepare, cpu=15, memory=700)


@group
def sealed_states() -> Iterator[Case]:
    """`state.json` with a right manifest: what it says is wrong, not its bytes."""
    changes: list[tuple[str, Any]] = [
        (key, value)
        for key in ("step", "world", "info", "format", "config", "micro")
        for value in _JSON_VALUES
    ]
    changes += [("", value) for value in _JSON_VALUES]
    for i, (key, value) in enumerate(changes):

        def prepare(place: Place, key: str = key, value: Any = value) -> None:
            RUN(place)
            newest = max((place.case / "run" / "checkpoints").glob("step-*"))
            state = json.loads((newest / "state.json").read_text())
            if key:
                state[key] = value
            else:
                state = value
            (newest / "state.json").write_text(json.dumps(state))
            reseal(newest)

        yield Case("C7", f"state-{key or 'whole'}-{i}", ON_RUN["resume"], prepare, cpu=15, memory=700)


def reseal(checkpoint: Path) -> None:
    """Make the manifest of a checkpoint right again."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())

    def renewed(entry: Any, name: str = "") -> Any:
        if isinstance(entry, dict):
            return {
                key: renewed(value, key if (checkpoint / key).is_file() else name)
                for key, value in entry.items()
            }
        file = checkpoint / name
        if name and isinstance(entry, str) and len(entry) == 64:
            return hashlib.sha256(file.read_bytes()).hexdigest()
        if name and isinstance(entry, int):
            return file.stat().st_size
        return entry

    path.write_text(json.dumps(renewed(manifest)))


@group
def cards_of_others() -> Iterator[Case]:
    def changed(place: Place, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        copies("photos", "encoder.safetensors")(place)
        path = place.case / "encoder.safetensors"
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        text = json.dumps(change(header)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    def set_card(value: str, key: str | None = None) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def change(header: dict[str, Any]) -> dict[str, Any]:
            metadata = header.get("__metadata__", {})
            for name, text in list(metadata.items()):
                if not text.startswith("{"):
                    continue
                if key is None:
                    metadata[name] = value
                else:
                    card = json.loads(text)
                    card[key] = json.loads(value)
                    metadata[name] = json.dumps(card)
            return header | {"__metadata__": metadata}

        return change

    texts = [json.dumps(value) for value in _JSON_VALUES] + ["[" * 5000, "", "{", '{"a":' * 3000, "9" * 5000]
    for i, text in enumerate(texts):
        prepare = partial(changed, change=set_card(text))
        yield Case("C7", f"card-whole-{i}", _EMBED_PHOTOS, prepare, cpu=12)
    for key in (
        "backbone",
        "stem",
        "width",
        "image_size",
        "mean",
        "std",
        "view",
        "network",
        "format",
        "method",
    ):
        for i, value in enumerate(_JSON_VALUES):
            prepare = partial(changed, change=set_card(json.dumps(value), key))
            yield Case("C7", f"card-{key}-{i}", _EMBED_PHOTOS, prepare, cpu=12)


# -- C8


TEXTS = {
    "esc": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "csi": "\x9b31m",
    "nel": f"a\x85{FORGED}",
    "newline": f"a\n{FORGED}",
    "return": f"a\r{FORGED}",
    "both": f"a\r\n{FORGED}",
    "ls": f"a\u2028{FORGED}",
    "ps": f"a\u2029{FORGED}",
    "bidi": "a\u202egnp.exe",
    "isolate": "a\u2066b\u2069",
    "rlm": "a\u200fb",
    "del": "a\x7fb",
    "bell": "a\x07b",
    "backspace": "a\x08\x08b",
    "vt": f"a\x0b{FORGED}",
    "ff": f"a\x0c{FORGED}",
    "letters": "éß漢字🙂",
    "bytes": "\udcff\udc80",
    "long": "a" * 3000,
    "markup": "[red]a[/red]",
    "percent": "%s %d %(x)s {x} {0}",
    "tab": f"a\t{FORGED}",
}
_WORDS: dict[str, tuple[str, ...]] = {
    "command": ("{}",),
    "kind": ("evaluate", "{}"),
    "recipe": ("plan", "{}"),
    "recipes": ("recipes", "{}"),
    "option": ("plan", "quickstart", "--{}"),
    "section": ("plan", "quickstart", "--train.{}", "1"),
    "number": ("plan", "quickstart", "--train.seed", "{}"),
    "choice": ("plan", "quickstart", "--method.name", "{}"),
    "config": ("plan", "quickstart", "--config", "{}"),
    "root": ("plan", "quickstart", "--data.name", "folder", "--data.root", "{}"),
    "split": ("plan", "quickstart", "--data.split", "{}"),
    "backbone": ("plan", "quickstart", "--images", "9", "--model.backbone", "{}"),
    "weights": ("embed", "{}", "--out", "a.npz"),
    "run": ("report", "{}"),
    "extra": ("report", "run", "--points", "3", "{}"),
    "export": ("export", "run", "--out", "e", "--format", "{}"),
    "device": ("plan", "quickstart", "--images", "9", "--train.device", "{}"),
    "completion": ("--print-completion={}",),
}


@group
def words_with_controls() -> Iterator[Case]:
    for where, words in _WORDS.items():
        for name, text in TEXTS.items():
            given = tuple(word.replace("{}", text) for word in words)
            prepare = copies("run") if "run" in words else copies()
            yield Case("C8", f"word-{where}-{name}", given, prepare, cpu=10)


@group
def names_with_controls() -> Iterator[Case]:
    """Names of files, classes, runs and members on the disk."""
    for name, text in TEXTS.items():
        short = text[:80].replace("/", "|")  # a name has none

        def classes(place: Place, text: str = short) -> None:
            folder = photos(place.case / "photos")
            (folder / "class0").rename(folder / text)
            copies("run")(place)

        yield Case("C8", f"class-{name}", ON_RUN["knn"], classes, cpu=15)

        def bad(place: Place, text: str = short) -> None:
            _among_photos(f"{text}.png", b"broken", place)

        words = (*PRETRAIN, "--out", "new", "--data.max_bad_fraction", "0.5")
        yield Case("C8", f"bad-{name}", words, bad, cpu=15)
        words = (*PRETRAIN, "--out", "new", "--data.max_bad_fraction", "0")
        yield Case("C8", f"too-bad-{name}", words, bad, cpu=15)

        def run(place: Place, text: str = short) -> None:
            place.copy("run", text)
            place.copy("photos")

        yield Case("C8", f"run-report-{name}", ("report", short, "--points", "3"), run, cpu=15, memory=700)
        words = ("embed", short, "--data", "photos", "--data.image_size", "8", "--out", f"{short}.npz")
        yield Case("C8", f"run-embed-{name}", words, run, cpu=15)
        words = (*PRETRAIN, "--out", short)
        yield Case("C8", f"run-resume-{name}", words, run, cpu=15)

        def folder(place: Place, text: str = short) -> None:
            (place.case / "photos" / text).mkdir(parents=True)
            (place.case / "photos" / "train").mkdir()

        yield Case(
            "C8",
            f"empty-{name}",
            ("plan", "quickstart", "--data.name", "folder", "--data.root", "photos"),
            folder,
        )

        def archive(place: Place, text: str = short) -> None:
            with zipfile.ZipFile(place.case / "a.zip", "w") as file:
                for i in range(8):
                    data = encoded(seed=i) if i else b"broken"
                    file.writestr(f"{text.encode('utf-8', 'replace').decode()}/{i}.png", data)
                    file.writestr(f"b/{i}.png", encoded(seed=9 + i))
            copies("encoder.safetensors")(place)

        words = (*EMBED, "--data", "a.zip", "--data.image_size", "8", "--data.max_bad_fraction", "0.5")
        yield Case("C8", f"member-{name}", words, archive, cpu=12)

        def listed(place: Place, text: str = text) -> None:
            text = text.encode("utf-8", "replace").decode()
            (place.case / "list.txt").write_text("".join(f"{text}{i}.png\t{text}\n" for i in range(4)))

        words = (
            *PRETRAIN[:-6],
            "--data.name",
            "list",
            "--data.root",
            "list.txt",
            "--out",
            "new",
            "--data.cache",
            "off",
        )
        yield Case("C8", f"list-{name}", words, listed, cpu=12)


@group
def terminals() -> Iterator[Case]:
    for encoding in ("ascii", "latin-1", "cp1252", "cp437", "shift_jis"):
        for name, words in {
            "help": ("--help",),
            "plan-help": ("plan", "--help"),
            "detect-help": ("detect", "--help"),
            "recipes": ("recipes",),
            "recipe": ("recipes", "quickstart"),
            "plan": PLAN,
            "pretrain": (*PRETRAIN, "--out", "new"),
            "knn": ON_RUN["knn"],
            "report": ON_RUN["report"],
            "export": ON_RUN["export"],
            "unknown": ("plan", "éß漢字🙂"),
            "reproduce": ("reproduce", "alpha", "--dry_run", "true"),
        }.items():
            yield Case("C8", f"terminal-{encoding}-{name}", words, RUN, encoding=encoding, cpu=15, memory=700)
        for name, text in {"letters": "éß漢字", "bytes": "\udcff"}.items():

            def classes(place: Place, text: str = text) -> None:
                folder = photos(place.case / "photos")
                (folder / "class0").rename(folder / text)
                copies("run")(place)

            yield Case(
                "C8", f"terminal-{encoding}-class-{name}", ON_RUN["knn"], classes, encoding=encoding, cpu=15
            )
            yield Case("C8", f"terminal-{encoding}-word-{name}", ("report", text), encoding=encoding)


# -- C9


_NUMBERS = [
    "0",
    "-1",
    "1000000000",
    "1000000000000",
    str(2**63 - 1),
    str(2**63),
    "9" * 40,
    "1e9",
    "1e300",
    "inf",
    "nan",
]
_NUMBERS += ["0x10", "1_000", "٣", "+5", " 7 ", "1e-300", "-0.0"]


def _is_number(hint: Any) -> bool:
    return any(kind in (int, float) for kind, _ in _kinds(hint))


@group
def numbers_of_a_plan() -> Iterator[Case]:
    for name, hint in leaves(Config).items():
        if _is_number(hint):
            for number in _NUMBERS:
                words = (*PLAN, f"--{name}={number}")
                yield Case("C9", f"plan-{name}-{number[:20].strip()}", words, cpu=6, memory=300)


@group
def numbers_of_commands() -> Iterator[Case]:
    """The same for everything that a command has besides: here the machine would really do it."""
    from momentum2.cli.commands import COMMANDS

    commands: dict[str, tuple[str, ...]] = {
        "pretrain": (*PRETRAIN, "--out", "new"),
        "views": ("views", "photos", "--out", "views.png", "--count", "2"),
        "evaluate knn": KNN,
        "evaluate linear": (
            "evaluate",
            "linear",
            *KNN[2:-8],
            "--floors",
            "false",
            "--epochs",
            "1",
            "--threads",
            "1",
        ),
        "evaluate semi": (
            "evaluate",
            "semi",
            *KNN[2:-8],
            "--fraction",
            "0.5",
            "--epochs",
            "1",
            "--threads",
            "1",
        ),
        "embed": ON_RUN["embed"],
        "report": ON_RUN["report"],
        "watch": ("watch", "nowhere"),
        "plan": PLAN,
        "detect": (
            *(
                "detect",
                "encoder.safetensors",
                "--out",
                "new",
                "--data.train_size",
                "2",
                "--data.test_size",
                "1",
            ),
            *("--data.short_edges", "32", "--data.test_short_edge", "32", "--data.max_long_edge", "32"),
            *(
                "--train.steps",
                "1",
                "--train.batch_size",
                "1",
                "--head.fpn_channels",
                "8",
                "--head.box_width",
                "8",
            ),
            *("--head.proposals", "4", "--head.sampled", "4", "--data.workers", "0", "--train.threads", "1"),
        ),
        "reproduce": ("reproduce", "alpha", "--dry_run", "true"),
    }
    skipped = {"train.seed", "seed"}
    for command, words in commands.items():
        for name, hint in COMMANDS[command].options().known.items():
            if not _is_number(hint) or name in skipped:
                continue
            if command == "plan" and "." in name:
                continue
            # What takes long by its nature is stopped by who asked for it: that many steps are no mistake.
            if name in ("train.epochs", "train.steps", "epochs", "optim.warmup_epochs"):
                numbers: tuple[str, ...] = ("0", "-1", "9" * 40)
            elif command == "pretrain" and name.startswith(("monitor.", "optim.", "views.", "eval_data.")):
                numbers = ("0", "-1", "9" * 40)
            else:
                numbers = ("0", "-1", "1000000000", "9" * 40)
            for number in numbers:
                given = (*words, f"--{name}={number}")
                prepare = copies("run", "photos", "encoder.safetensors")
                label = f"{command.replace(' ', '-')}-{name}-{number[:12]}"
                cpu = 25 if command == "detect" else 12
                yield Case("C9", label, given, prepare, cpu=cpu, memory=1200)


# -- C10


@group
def weights_of_others() -> Iterator[Case]:
    def saved(value: Any) -> bytes:
        data = io.BytesIO()
        torch.save(value, data)
        return data.getvalue()

    itself: dict[str, Any] = {}
    itself["state_dict"] = itself
    two: dict[str, Any] = {"model": {}}
    two["model"]["state_dict"] = two
    good = {"conv1.weight": torch.zeros(4, 3, 3, 3)}
    odd: dict[str, Any] = {
        "itself": itself,
        "two": two,
        "numbers": {1: torch.zeros(1)},
        "newline": {"a\nFORGED": torch.zeros(1)},
        "esc": {"\x1b[31m": torch.zeros(1)},
        "empty": {},
        "tensor": torch.zeros(3),
        "list": [torch.zeros(1)],
        "text": "abc",
        "nest-empty": {"state_dict": {}},
        "nest-list": {"state_dict": []},
        "nest-none": {"model": None},
        "nan": {"conv1.weight": torch.full((4, 3, 3, 3), float("nan"))},
        "zero-size": {
            "conv1.weight": torch.zeros(0, 3, 3, 3),
            "layer1.0.conv2.weight": torch.zeros(0, 0, 3, 3),
        },
        "scalar": {"conv1.weight": torch.tensor(1.0), "layer1.0.conv2.weight": torch.tensor(1.0)},
        "one-dimension": {"conv1.weight": torch.zeros(4), "layer1.0.conv2.weight": torch.zeros(4)},
        "int": {"conv1.weight": torch.zeros(4, 3, 3, 3, dtype=torch.int64)},
        "complex": {"conv1.weight": torch.zeros(4, 3, 3, 3, dtype=torch.complex64)},
        "sparse": {"conv1.weight": torch.zeros(4, 4).to_sparse()},
        "meta": {"conv1.weight": torch.zeros(4, 3, 3, 3, device="meta")},
        "strides": {"conv1.weight": torch.zeros(1).expand(1 << 15, 1 << 15)},
        "prefixes": {f"{p}conv1.weight": torch.zeros(4, 3, 3, 3) for p in ("", "module.", "encoder.")},
        "layers": good | {f"layer1.{i}.conv2.weight": torch.zeros(4, 4, 3, 3) for i in range(999)},
        "layer-names": good | {"layer1": torch.zeros(1), "layer1.0.conv2.weight": torch.zeros(4, 4, 3, 3)},
    }
    files: dict[str, bytes] = {f"{name}.pth": saved(value) for name, value in odd.items()}
    files |= {
        f"bomb{suffix}": pickled_bomb() for suffix in (".pth", ".pt", ".bin", ".pkl", ".safetensors", "")
    }
    whole = saved(good)
    files |= {f"damaged-{name}.pth": data for name, data in damages(whole, 28, seed=3)}
    files |= {
        f"header-{name}.safetensors": safetensors_file(data, bytes(4))
        for name, data in safetensors_headers().items()
    }
    files["length.safetensors"] = b"\xff" * 8 + b"{}"
    files["length2.safetensors"] = (1 << 40).to_bytes(8, "little") + b"{}"
    files["zip.pth"] = zip_bomb(64 << 20)
    for name, data in files.items():
        prepare = both(write(name, data), copies("photos"))
        for command, words in {
            "start": (*PRETRAIN, "--out", "new", "--model.weights", name),
            "embed": ("embed", name, *EMBED[2:], "--data", "photos", "--data.image_size", "8"),
        }.items():
            yield Case("C10", f"{command}-{name}", words, prepare, codes=frozenset({2}), cpu=8)


@group
def flipped_encoders() -> Iterator[Case]:
    """One bit of a sealed file: each is noticed, wherever it is."""
    for share in (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999):
        for command, words in {
            "start": (*PRETRAIN, "--out", "new", "--model.weights", "encoder.safetensors"),
            "embed": _EMBED_PHOTOS,
            "export": ("export", "encoder.safetensors", "--format", "torchvision", "--out", "exported"),
        }.items():

            def flip(place: Place, share: float = share) -> None:
                path = place.case / "encoder.safetensors"
                data = bytearray(path.read_bytes())
                data[int(share * len(data))] ^= 1
                path.write_bytes(data)

            prepare = both(copies("photos", "encoder.safetensors"), flip)
            yield Case("C10", f"flip-{command}-{share}", words, prepare, codes=frozenset({2}), cpu=10)


@group
def damaged_checkpoints() -> Iterator[Case]:
    """Damage to the newest checkpoint: the one before it is taken, or a sentence says why not."""
    for i in range(24):

        def damage(place: Place, i: int = i) -> None:
            newest = max((place.case / "run" / "checkpoints").glob("step-*"))
            files = sorted(path for path in newest.iterdir() if path.is_file())
            path = files[i % len(files)]
            spoiled = list(damages(path.read_bytes(), 7, seed=i))
            path.write_bytes(spoiled[i // len(files) % 7][1])

        yield Case("C10", f"checkpoint-{i}", ON_RUN["resume"], both(RUN, damage), cpu=15)
    for part in ("optimizer", "model"):

        def lacking(place: Place, part: str = part) -> None:
            from safetensors.torch import load_file, save_file

            newest = max((place.case / "run" / "checkpoints").glob("step-*"))
            for path in newest.glob("*.safetensors"):
                if part in path.name:
                    tensors = load_file(path)
                    tensors.pop(sorted(tensors)[len(tensors) // 2])
                    save_file(tensors, path)
            reseal(newest)

        yield Case(
            "C10", f"lacking-{part}", ON_RUN["resume"], both(RUN, lacking), codes=frozenset({2}), cpu=15
        )


# -- C11


def _same_features(place: Place, facts: Facts) -> str | None:
    """What came out is what comes out of a sound cache, or nothing did."""
    if facts.code != 0:
        return None
    found = np.load(place.case / "found.npz")["features"]
    right = np.load(place.bases / "found.npz")["features"]
    return None if np.array_equal(found, right) else "other features without a word"


@group
def caches_of_others() -> Iterator[Case]:
    words = (*EMBED[:-1], "on", "--data", "photos", "--data.image_size", "8", "--data.cache_dir", "cache")

    def folder_of(place: Place) -> Path:
        return next(path for path in (place.case / "cache").iterdir() if path.is_dir())

    def sound(place: Place) -> None:
        source = place.bases
        for name in ("photos", "cache", "encoder.safetensors"):
            place.copy(name)
        for path in (source / "photos").rglob("*"):  # the key has their times
            copied = place.case / path.relative_to(source)
            os.utime(copied, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))

    for name in ("index.npy", "manifest.json", "pixels.bin"):
        for i in range(14):

            def damage(place: Place, name: str = name, i: int = i) -> None:
                path = folder_of(place) / name
                path.write_bytes(list(damages(path.read_bytes(), 14, seed=7))[i][1])

            yield Case("C11", f"damaged-{name}-{i}", words, both(sound, damage), cpu=12, check=_same_features)
        for kind in KINDS:

            def other(place: Place, name: str = name, kind: str = kind) -> None:
                replace_by(folder_of(place) / name, kind)

            yield Case("C11", f"kind-{name}-{kind}", words, both(sound, other), cpu=12, check=_same_features)
    for i, change in enumerate(
        [
            lambda a: a + 1,
            lambda a: -a,
            lambda a: a[:3],
            lambda a: a.astype(np.float64),
            lambda a: a.astype(np.int32),
            lambda a: a * (1 << 40),
            lambda a: a.T.copy(),
            lambda a: a[::-1].copy(),
            lambda a: np.zeros_like(a),
            lambda a: np.array([b"x"], object),
            lambda a: a[:, [0, 2, 1]],
            lambda a: np.full_like(a, 2**62),
        ]
    ):

        def foreign(place: Place, change: Callable[[Any], Any] = change) -> None:
            path = folder_of(place) / "index.npy"
            np.save(path, change(np.load(path)), allow_pickle=True)

        yield Case("C11", f"foreign-index-{i}", words, both(sound, foreign), cpu=12, check=_same_features)
    for key in ("bytes", "bad", "index", "blocks"):
        for i, value in enumerate(_JSON_VALUES):

            def manifest(place: Place, key: str = key, value: Any = value) -> None:
                path = folder_of(place) / "manifest.json"
                path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

            yield Case(
                "C11", f"manifest-{key}-{i}", words, both(sound, manifest), cpu=12, check=_same_features
            )
    if os.getuid() == 0:

        def somebodys(place: Place) -> None:
            folder = folder_of(place)
            pixels = folder / "pixels.bin"
            pixels.write_bytes(bytes(len(pixels.read_bytes())))
            for path in (folder, *folder.iterdir()):
                os.chown(path, 12345, 12345)

        yield Case("C11", "somebody-elses", words, both(sound, somebodys), cpu=12, check=_same_features)


# -- C12, C13, C14: what one command shows of them; tests/runs, tests/distributed and tests/report have the rest


@group
def places_of_results() -> Iterator[Case]:
    for name in (
        "results.json",
        "results.json.lock",
        ".results.lock",
        ".results.json.lock",
        "results.lock",
        ".lock",
    ):
        for kind in ("fifo", "zero", "folder", "dangling", "itself", "noise"):

            def plant(place: Place, name: str = name, kind: str = kind) -> None:
                RUN(place)
                replace_by(place.case / "run" / name, kind)

            yield Case("C12", f"{name}-{kind}", ON_RUN["knn"], plant, cpu=12)

    def closed(place: Place) -> None:
        RUN(place)
        (place.case / "run").chmod(0o555)

    yield Case("C12", "closed", ON_RUN["knn"], closed, cpu=12, powerless=True)


@group
def environments() -> Iterator[Case]:
    good = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name in (*good, "LOCAL_WORLD_SIZE"):
        for value in ("", "x", "-1", "9" * 30, "\x1b[31m", "1e3", "٣"):
            if (name, value) == ("WORLD_SIZE", "٣"):  # three, who are waited for
                continue
            given = {name: value} if name == "LOCAL_WORLD_SIZE" else good | {name: value}
            for command, words in {"plan": PLAN, "pretrain": (*PRETRAIN, "--out", "new")}.items():
                label = f"{command}-{name}-{ascii(value)[1:9]}"
                codes = frozenset({0, 1, 2})  # 1: the others of the run are not there
                yield Case("C13", label, words, copies("photos"), codes=codes, environment=given, cpu=12)


@group
def pages_that_cannot_be_served() -> Iterator[Case]:
    for port in ("-1", "65536", "x", "9" * 30, "", "1.5", "80.0", "none"):
        words = ("watch", "run", "--port", port)
        yield Case("C14", f"port-{port[:9]}", words, RUN, codes=frozenset({2}), cpu=8)
    for kind in KINDS:

        def spoil(place: Place, kind: str = kind) -> None:
            RUN(place)
            replace_by(place.case / "run" / "config.yaml", kind)

        yield Case(
            "C14", f"config-{kind}", ("watch", "run", "--port", "0"), spoil, codes=frozenset({2}), cpu=8
        )


# -- C15


_ARCHIVE = (*EMBED, "--data.image_size", "8", "--data.max_bad_fraction", "0.9", "--data")


@group
def archives() -> Iterator[Case]:
    encoder = copies("encoder.safetensors")
    for name, data in hostile_tars().items():
        prepare = both(write("a.tar", data), encoder)
        yield Case("C15", f"tar-{name}", (*_ARCHIVE, "a.tar"), prepare, cpu=8)
    for base in ("photos.tar", "photos.zip"):
        for i in range(40):

            def damage(place: Place, base: str = base, i: int = i) -> None:
                path = place.copy(base)
                data = path.read_bytes()
                draw = random.Random(i)
                if base.endswith(".zip") and i % 2:  # the directory is at the end
                    cut = data.rindex(b"PK\1\2")
                    at = draw.randrange(cut, len(data))
                    data = data[:at] + draw.randbytes(3) + data[at + 3 :]
                else:
                    data = list(damages(data, 40, seed=5))[i][1]
                path.write_bytes(data)

            yield Case("C15", f"damaged-{base}-{i}", (*_ARCHIVE, base), both(encoder, damage), cpu=8)
    for megabytes in (64, 600):
        prepare = both(lambda place, n=megabytes: write("bomb.zip", zip_bomb(n << 20))(place), encoder)  # type: ignore[misc]
        yield Case("C15", f"zip-bomb-{megabytes}", (*_ARCHIVE, "bomb.zip"), prepare, cpu=15, memory=400)
    for name in ("a.tar.gz", "a.rar", "a.7z", "a", "a.zip", "a.tar"):
        prepare = both(write(name, random.Random(1).randbytes(3000)), encoder)
        yield Case("C15", f"noise-{name}", (*_ARCHIVE, name), prepare, codes=frozenset({2}), cpu=8)


@group
def folders() -> Iterator[Case]:
    words = ("plan", "quickstart", "--data.name", "folder", "--data.root", "photos")

    def ladder(place: Place) -> None:
        folder = place.case / "photos"
        for i in range(30):
            (folder / str(i)).mkdir(parents=True)
            for link in "ab":
                (folder / str(i) / link).symlink_to(f"../{i + 1}")
        (folder / "30").mkdir()
        (folder / "30" / "a.png").write_bytes(encoded())

    yield Case("C15", "ladder-of-links", words, ladder, cpu=6)

    def deep(place: Place) -> None:
        here = os.getcwd()
        (place.case / "photos").mkdir()
        os.chdir(place.case / "photos")
        for _ in range(3000):
            os.mkdir("a")
            os.chdir("a")
        os.chdir(here)

    yield Case("C15", "deep-folders", words, deep, cpu=8)

    def cycle(place: Place) -> None:
        photos(place.case / "photos")
        (place.case / "photos" / "class0" / "up").symlink_to("../..")
        (place.case / "photos" / "class1" / "self").symlink_to(".")

    yield Case("C15", "cycle", words, cycle, cpu=8)

    def specials(place: Place) -> None:
        folder = photos(place.case / "photos") / "class0"
        os.mkfifo(folder / "fifo.png")
        (folder / "zero.png").symlink_to("/dev/zero")
        (folder / "dangling.png").symlink_to("nowhere")
        (folder / "itself.png").symlink_to("itself.png")
        (folder / "folder.png").mkdir()
        os.mknod(folder / "socket.png", 0o140666)
        sparse(folder / "sparse.png")
        copies("encoder.safetensors")(place)

    yield Case("C15", "special-files", _EMBED_PHOTOS, specials, cpu=10)


@group
def lists() -> Iterator[Case]:
    texts: dict[str, bytes] = {
        "nul": b"a\0b.png\n",
        "nul-many": b"\0.png\n" * 50,
        "absolute": b"/etc/passwd.png\n/dev/zero\n",
        "up": b"../victims/file.txt\n../victims/secret\n",
        "long": b"a" * 100_000 + b".png\n",
        "latin1": b"\xe9.png\n",
        "utf16": "a.png\n".encode("utf-16"),
        "bom": b"\xef\xbb\xbfa.png\n",
        "mixed": b"a.png 1\nb.png\n",
        "digits": b"a.png\t" + b"9" * 5000 + b"\nb.png\t1\n",
        "unicode-digits": "a.png\t²\nb.png\t1\n".encode(),
        "arabic-digits": "a.png\t٣\nb.png\t1\n".encode(),
        "negative": b"a.png\t-1\nb.png\t1\n",
        "huge": b"a.png\t999999999999999999999999\n",
        "empty-label": b"a.png\t\nb.png\t\n",
        "tabs": b"\t\t\t\n",
        "spaces": b"     \n",
        "fifo": b"fifo.png\t0\nfifo.png\t1\n",
        "folder": b".\n..\n/\n",
        "tilde": b"~root/a.png\n~nosuchuser/a.png\n",
        "many": b"".join(b"%d.png\t%d\n" % (i, i % 3) for i in range(20_000)),
        "separators": "a.png\u2028b.png\x85c.png\x0bd.png\x1ce.png\n".encode(),
        "url": b"http://localhost:1/a.png\n",
    }
    for name, data in texts.items():

        def prepare(place: Place, data: bytes = data) -> None:
            (place.case / "list.txt").write_bytes(data)
            os.mkfifo(place.case / "fifo.png")
            copies("encoder.safetensors")(place)

        for command, words in {
            "plan": ("plan", "quickstart", "--data.name", "list", "--data.root", "list.txt"),
            "embed": (*_ARCHIVE, "list.txt"),
        }.items():
            yield Case("C15", f"list-{command}-{name}", words, prepare, cpu=10)
    for i in range(20):
        prepare2 = both(write("list.txt", random.Random(i).randbytes(400)), copies("encoder.safetensors"))
        yield Case("C15", f"list-noise-{i}", (*_ARCHIVE, "list.txt"), prepare2, cpu=8)


@group
def cifar() -> Iterator[Case]:
    words = ("plan", "quickstart", "--data.name", "cifar10", "--data.root", ".")
    for name, data in cifar_pickles().items():
        for file in ("data_batch_1", "batches.meta"):

            def prepare(place: Place, data: bytes = data, file: str = file) -> None:
                folder = place.case / "cifar-10-batches-py"
                folder.mkdir()
                import pickle

                for i in range(1, 6):
                    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}
                    (folder / f"data_batch_{i}").write_bytes(pickle.dumps(batch, protocol=2))
                names = {"label_names": [str(i) for i in range(10)]}
                (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
                (folder / file).write_bytes(data)

            yield Case("C15", f"cifar-{file}-{name}", words, prepare, codes=frozenset({2}), cpu=8, memory=300)
    for kind in ("fifo", "zero", "sparse", "folder", "empty", "noise"):
        for file in ("data_batch_1.bin", "batches.meta.txt"):

            def binary(place: Place, kind: str = kind, file: str = file) -> None:
                folder = place.case / "cifar-10-batches-bin"
                folder.mkdir()
                for i in range(1, 6):
                    (folder / f"data_batch_{i}.bin").write_bytes(bytes(3073 * 2))
                (folder / "batches.meta.txt").write_text("\n".join(map(str, range(10))))
                replace_by(folder / file, kind)

            yield Case("C15", f"cifar-{file}-{kind}", words, binary, codes=frozenset({2}), cpu=8, memory=300)
    for kind in ("fifo", "zero", "folder", "empty", "noise"):
        for file in ("train_X.bin", "train_y.bin", "class_names.txt"):

            def stl(place: Place, kind: str = kind, file: str = file) -> None:
                folder = place.case / "stl10_binary"
                folder.mkdir()
                (folder / "train_X.bin").write_bytes(bytes(96 * 96 * 3 * 2))
                (folder / "train_y.bin").write_bytes(b"\1\2")
                (folder / "class_names.txt").write_text("a b c")
                replace_by(folder / file, kind)

            words_stl = (
                "plan",
                "quickstart",
                "--data.name",
                "stl10",
                "--data.root",
                ".",
                "--data.split",
                "train",
            )
            yield Case("C15", f"stl-{file}-{kind}", words_stl, stl, codes=frozenset({2}), cpu=8, memory=300)


@group
def annotations() -> Iterator[Case]:
    words = ("detect", "encoder.safetensors", "--out", "new", "--data.name", "coco", "--data.root", "coco")
    words = (*words, "--data.test_split", "train", "--train.steps", "1")
    good: dict[str, Any] = {
        "images": [{"id": 1, "width": 12, "height": 12, "file_name": "a.png"}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5], "iscrowd": 0, "area": 25}
        ],
    }
    texts: list[str] = [
        "[" * 50_000,
        '{"a":' * 50_000,
        "",
        "null",
        "[]",
        "{}",
        "9" * 5000,
        '{"images": ' + "9" * 5000 + "}",
    ]
    for section in good:
        for value in _JSON_VALUES:
            texts.append(json.dumps(good | {section: value}))
            texts.append(json.dumps(good | {section: [value]}))
        for key in good[section][0]:
            for value in _JSON_VALUES:
                texts.append(json.dumps(good | {section: [good[section][0] | {key: value}]}))
    for path in ("../../victims/secret", "/etc/passwd", "a" * 300 + ".png", "\0.png", "fifo.png"):
        texts.append(json.dumps(good | {"images": [good["images"][0] | {"file_name": path}]}))
    for i, text in enumerate(texts):

        def prepare(place: Place, text: str = text) -> None:
            (place.case / "coco" / "annotations").mkdir(parents=True)
            (place.case / "coco" / "annotations" / "instances_train.json").write_text(text)
            (place.case / "coco" / "train").mkdir()
            (place.case / "coco" / "train" / "a.png").write_bytes(encoded())
            os.mkfifo(place.case / "coco" / "train" / "fifo.png")
            copies("encoder.safetensors")(place)

        # Only mistakes are of interest here: a sound file would begin to train.
        yield Case(
            "C15",
            f"coco-{i}",
            (*words, "--model", "retinanet", *_SMALL_DETECTOR),
            prepare,
            cpu=20,
            memory=900,
        )


_SMALL_DETECTOR = (
    *(
        "--data.short_edges",
        "32",
        "--data.test_short_edge",
        "32",
        "--data.max_long_edge",
        "32",
        "--data.workers",
        "0",
    ),
    *("--train.batch_size", "1", "--train.threads", "1", "--head.fpn_channels", "8"),
)


def every_case() -> list[Case]:
    """All of them, in a fixed order."""
    return [case for make in GROUPS for case in make()]


def some_cases(each: int) -> list[Case]:
    """A fixed choice from every group."""
    chosen = []
    for make in GROUPS:
        cases = list(make())
        chosen += random.Random(make.__name__).sample(cases, min(each, len(cases)))
    return chosen
