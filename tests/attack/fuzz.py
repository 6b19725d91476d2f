"""Feed damaged files to everything that reads files: `python tests/attack/fuzz.py [--seconds 600] [--only tar,yaml]`.

Good files are damaged a few times over at random and given to the function that reads them, in a process with little
memory that is forked for each batch of inputs. A reader may return, or raise what a person is meant to read. Anything
else is a finding: another exception, a crash of the process, or more than two seconds of CPU for one input. Findings
are kept in a folder with the input that caused them; exits with 1 if there is one. The same seed gives the same inputs.
"""

import argparse
import io
import json
import os
import pickle
import random
import resource
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import safetensors.torch
import torch
from corpus import cifar_pickles, encoded, hostile_tars, safetensors_file, safetensors_headers

from momentum2.config import Config
from momentum2.data.archive import open_archive
from momentum2.data.binary import open_cifar
from momentum2.data.folders import open_list
from momentum2.data.images import BadImage, Encoded
from momentum2.detection.coco import CocoData
from momentum2.errors import UserError
from momentum2.runs.handle import read_run
from momentum2.settings import override
from momentum2.weights import read_state
from momentum2.yaml_settings import read_settings

BATCH = 200  # inputs of a process
SLOWEST = 2.0  # CPU seconds of an input
MEMORY = 1500 << 20  # bytes above what imports take

Reader = Callable[[bytes, Path], object]


def read_image(data: bytes, place: Path) -> None:
    picture = Encoded(data)
    assert picture.size == picture.pixels().shape[:2]


def read_archive(data: bytes, place: Path) -> None:
    path = place / "a.bin"
    path.write_bytes(data)
    archive = open_archive(path, "train")
    for i in range(min(len(archive), 20)):
        try:
            archive.picture(i).pixels()
        except BadImage:
            continue


def read_weights(suffix: str) -> Reader:
    def read(data: bytes, place: Path) -> None:
        path = place / f"weights{suffix}"
        path.write_bytes(data)
        read_state(path)

    return read


def read_yaml(data: bytes, place: Path) -> None:
    path = place / "config.yaml"
    path.write_bytes(data)
    override(Config(), read_settings(path))


def read_list(data: bytes, place: Path) -> None:
    path = place / "list.txt"
    path.write_bytes(data)
    files = open_list(path, "train")
    for i in range(min(len(files), 10)):
        files.stamp(i)
        try:
            files.picture(i)
        except BadImage:
            continue


def read_cifar(data: bytes, place: Path) -> None:
    folder = place / "cifar-10-batches-py"
    folder.mkdir(exist_ok=True)
    batch = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}, protocol=2)
    for i in range(1, 6):
        (folder / f"data_batch_{i}").write_bytes(data if i == 1 else batch)
    names = {"label_names": [str(i) for i in range(10)]}
    (folder / "batches.meta").write_bytes(pickle.dumps(names, protocol=2))
    open_cifar(place, "train", 10)


def read_coco(data: bytes, place: Path) -> None:
    (place / "images").mkdir(exist_ok=True)
    (place / "images" / "a.png").write_bytes(encoded())
    (place / "a.json").write_bytes(data)
    found = CocoData(place / "a.json", place / "images")
    for i in range(min(5, len(found.image_ids))):
        found.image(i)
        found.target(i, masks=False)


def read_directory(data: bytes, place: Path) -> None:
    """A run directory whose small files are parts of the input."""
    parts = data.split(b"\0\0SPLIT\0\0")
    for name, part in zip(
        ("config.yaml", "metrics.jsonl", "results.json", "plan.txt", "plan.json"), parts, strict=False
    ):
        (place / name).write_bytes(part)
    run = read_run(place)
    _ = run.step, run.steps, run.settings


def _seeds() -> dict[str, tuple[Reader, list[bytes]]]:
    """Each reader with good and hostile inputs to start from."""
    pictures = []
    for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "TGA", "AVIF"):
        for mode in ("RGB", "L", "P", "RGBA", "I;16", "CMYK", "1"):
            try:
                pictures.append(encoded(kind, side=20, mode=mode))
            except (KeyError, OSError, ValueError):
                continue
    tar, packed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as file:
        for i in range(3):
            member = tarfile.TarInfo(f"class{i}/{'é' * 60}{i}.png")
            data = encoded(seed=i)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for i in range(3):
            file.writestr(f"class{i}/{i}.png", encoded(seed=i))
    state = {"conv1.weight": torch.zeros(4, 3, 3, 3), "bn1.num_batches_tracked": torch.tensor(1)}
    saved = io.BytesIO()
    torch.save({"state_dict": state}, saved)
    batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}
    from dataclasses import asdict

    import yaml

    settings = yaml.safe_dump(asdict(Config()), sort_keys=False).encode()
    coco = {
        "images": [{"id": 1, "width": 12, "height": 12, "file_name": "a.png"}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 5], "iscrowd": 0}],
    }
    metrics = b'{"step": 1, "loss": 0.5, "knn": 1.0}\n{"step": 2, "alarm": "x"}\n'
    accuracy = {"top1": 1.0, "top5": None, "low": 0.0, "high": 2.0, "per_class": {"a": 1.0}, "images": 3}
    result = {"evaluation": "knn", "data": "x", "network": "teacher", "accuracy": accuracy}
    results = json.dumps({"knn": result | {"floors": {"a": 1.0}, "settings": {"k": 1}}}).encode()
    return {
        "image": (read_image, pictures),
        "tar": (read_archive, [tar.getvalue(), *hostile_tars().values()]),
        "zip": (read_archive, [packed.getvalue()]),
        "safetensors": (
            read_weights(".safetensors"),
            [safetensors.torch.save(state, {"a": "{}"})]
            + [safetensors_file(header, bytes(4)) for header in safetensors_headers().values()],
        ),
        "pth": (read_weights(".pth"), [saved.getvalue()]),
        "yaml": (read_yaml, [settings, settings[:400], b"train: {seed: 1}\n"]),
        "list": (read_list, [b"a.png\t1\nb.png\t2\n", b"a.png\nb b.jpg\n", "é.png 3\n".encode()]),
        "cifar": (
            read_cifar,
            [pickle.dumps(batch, protocol=p) for p in (2, 4, 5)] + [*cifar_pickles().values()],
        ),
        "coco": (read_coco, [json.dumps(coco).encode()]),
        "run": (read_directory, [b"\0\0SPLIT\0\0".join([settings, metrics, results, b"steps  4 of 2"])]),
    }


_TOKENS = [
    b"\0",
    b"\xff",
    b"\n",
    b"\x1b[",
    b"9" * 50,
    b"-1",
    b"[" * 300,
    b"{" * 300,
    b"null",
    b"NaN",
    b"1e999",
    b"!!x ",
]
_TOKENS += [
    b"&a ",
    b"*a",
    b"\xff\xff\xff\x7f",
    b"\xff" * 8,
    b"\0\0\0\x80",
    b"../",
    b"\t",
    b": ",
    b"- ",
    b'"',
    b"PK\1\2",
]


def mutated(seeds: list[bytes], draw: random.Random) -> bytes:
    """A good input, damaged one to eight times."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randint(1, 8)):
        size = len(data)
        where = draw.randrange(size + 1)
        if draw.random() < 0.4:
            where = min(where, draw.randrange(200))
        length = draw.choice((1, 1, 2, 4, 8, 64, 512))
        match draw.randrange(8):
            case 0:
                data[where : where + 1] = bytes([draw.randrange(256)])
            case 1 if where < size:
                data[where] ^= 1 << draw.randrange(8)
            case 2:
                del data[where : where + length]
            case 3:
                data[where:where] = draw.randbytes(length)
            case 4:
                data[where:where] = draw.choice(_TOKENS)
            case 5:
                token = draw.choice(_TOKENS)
                data[where : where + len(token)] = token
            case 6:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                data[where : where + length] = other[start : start + length]
            case 7:
                data[where:where] = data[where : where + length] * draw.choice((1, 2, 50))
    return bytes(data[: 1 << 20])


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def try_batch(name: str, reader: Reader, seeds: list[bytes], seed: str, note: Path) -> None:
    """In a fork: read a batch; a finding is left in `note` as a text, the number of the input before each."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    draw = random.Random(seed)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # what libraries say about damaged files
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm") as folder, note.open("w") as said:
        for i in range(BATCH):
            data, before = mutated(seeds, draw), _spent()
            said.seek(0)
            said.truncate()
            said.write(f"{i}\n")
            said.flush()
            limit = int(before + SLOWEST) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            try:
                reader(data, Path(folder))
            except (UserError, BadImage):
                pass
            except Exception:
                said.write(traceback.format_exc())
                said.flush()
                os._exit(3)
            if _spent() - before > SLOWEST:
                said.write(f"{_spent() - before:.1f} s of CPU\n")
                said.flush()
                os._exit(3)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="readers, separated by commas")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder of the findings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    readers = {n: r for n, r in _seeds().items() if not options.only or n in options.only.split(",")}
    inputs, findings, begin, number = (
        Counter[str](),
        Counter[str](),
        time.monotonic(),
        options.seed * 1_000_000,
    )
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        note = Path(folder, "note")
        while time.monotonic() - begin < options.seconds:
            for name, (reader, seeds) in readers.items():
                seed = f"{name} {number}"
                process = os.fork()
                if process == 0:
                    try:
                        try_batch(name, reader, seeds, seed, note)
                    finally:
                        os._exit(4)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                done, _, why = note.read_text().partition("\n")
                inputs[name] += int(done) + 1
                if code:
                    findings[name] += 1
                    _keep(options.keep, name, seeds, seed, int(done), why or f"the process ended with {code}")
            number += 1
    seconds = time.monotonic() - begin
    print(f"\n{'reader':<14}{'inputs':>10}{'findings':>10}")
    for name in readers:
        print(f"{name:<14}{inputs[name]:>10,}{findings[name]:>10}")
    print(f"{'all':<14}{inputs.total():>10,}{findings.total():>10}   in {seconds:.0f} s")
    return 1 if findings.total() else 0


def _keep(folder: Path, name: str, seeds: list[bytes], seed: str, number: int, why: str) -> None:
    draw = random.Random(seed)
    data = [mutated(seeds, draw) for _ in range(number + 1)][-1]
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{seed.split()[1]}-{number}"
    (folder / f"{stem}.bin").write_bytes(data)
    (folder / f"{stem}.txt").write_text(why)
    lines = why.strip().splitlines()
    print(f"{stem}: {lines[-1][:200] if lines else why}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
