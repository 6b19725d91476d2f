"""What it costs to read the same images from every kind of source, and to start with many of them.

    python benchmarks/data.py --images FOLDER [--count 10000]

FOLDER has one folder of image files for each class. Its first images are written again in every form, and 200 random
ones must have the same pixels in all of them. Then each form is opened in a process of its own: CPU time and memory
until the data set is there, and CPU time of one random image, encoded and decoded, beside what the library that people
use for such files takes for the same. The last table opens data sets of more and more images that nobody looks at.

CPU time on a busy machine is good for ratios, not for the third digit.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data"))

import numpy as np
from forms import Pairs, as_form, write_shards

from momentum2.config import DataConfig
from momentum2.data import Dataset, open_dataset
from momentum2.data.dataset import Numbered
from momentum2.data.fingerprint import fingerprint
from momentum2.data.images import Array, Encoded, Picture
from momentum2.data.sampler import batch_indices, chosen_order
from momentum2.data.sequence import as_dataset

FORMS = ("folder", "zip", "tar", "csv", "shards", "parquet", "arrow", "python")
SHARDS = 16
MANY = (10_000, 100_000, 1_000_000)


class Virtual(Dataset):
    """Images that are made up when they are asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(Numbered(count))

    def picture(self, index: int) -> Picture:
        return Array(np.full((8, 8, 3), index % 251, np.uint8))

    def stamp(self, index: int) -> str:
        return str(index)


def memory() -> float:
    """MB of this process that are in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def opened(form: str, data: dict[str, Any]) -> Dataset:
    if form == "python":
        return as_dataset(Pairs(Path(data["root"])))
    return open_dataset(DataConfig(**data, cache="off"))


def each(work: Callable[[int], Any], indices: list[int]) -> float:
    """CPU microseconds of one, the best of three turns."""
    turns = []
    for _ in range(3):
        start = time.process_time()
        for i in indices:
            work(i)
        turns.append((time.process_time() - start) / len(indices) * 1e6)
    return min(turns)


def theirs(form: str, data: dict[str, Any], dataset: Dataset) -> tuple[str, Callable[[int], Any]] | None:
    """The usual reader of such files, to a decoded image, if it can take any image by its number."""
    root = data["root"]
    match form:
        case "folder" | "python":
            from momentum2._torchvision import torchvision

            images = torchvision.datasets.ImageFolder(root)
            return "torchvision ImageFolder", lambda i: np.asarray(images[i][0])
        case "zip":
            import zipfile

            from PIL import Image

            archive = zipfile.ZipFile(root)
            return "zipfile + Pillow", lambda i: np.asarray(
                Image.open(archive.open(dataset.names[i])).convert("RGB")
            )
        case "tar":
            import tarfile

            from PIL import Image

            tar = tarfile.open(root)  # noqa: SIM115
            return "tarfile + Pillow", lambda i: np.asarray(
                Image.open(tar.extractfile(dataset.names[i])).convert("RGB")
            )
        case "parquet" | "arrow":
            import datasets

            rows = (
                datasets.load_from_disk(root)
                if form == "arrow"
                else datasets.load_dataset("parquet", data_files=root, split="train")
            )
            return "datasets", lambda i: np.asarray(rows[i]["image"])
    return None


def in_order(root: str, count: int) -> float | None:
    """CPU microseconds of an image by webdataset, which reads shards from their beginning."""
    try:
        import webdataset
    except ImportError:
        return None
    files = sorted(str(file) for file in Path(root).glob("*.tar"))
    start = time.process_time()
    for i, _ in enumerate(
        webdataset.WebDataset(files, shardshuffle=False).decode("rgb8").to_tuple("jpg;png", "cls")
    ):
        if i == count:
            break
    return (time.process_time() - start) / count * 1e6


def measure(form: str, data: dict[str, Any], reads: int) -> dict[str, Any]:
    """In a process of its own."""
    if form in ("parquet", "arrow"):
        import datasets  # noqa: F401  (a second of CPU time that only these need)
    before, start = memory(), time.process_time()
    dataset = opened(form, data)
    seconds, grown = time.process_time() - start, memory() - before
    indices = np.random.default_rng(0).integers(0, len(dataset), reads).tolist()

    def encoded(i: int) -> None:
        picture = dataset.picture(i)
        assert isinstance(picture, Encoded) or form == "python"

    found = {"start": seconds, "MB": grown, "read": each(encoded, indices)}
    found["decoded"] = each(lambda i: dataset.picture(i).pixels(), indices)
    if form == "shards":
        found["theirs"], found["reader"] = in_order(data["root"], reads), "webdataset, in order"
    elif other := theirs(form, data, dataset):
        found["reader"], found["theirs"] = other[0], each(other[1], indices)
    return found


def many(count: int, kind: str, folder: Path) -> dict[str, Any]:
    """Open `count` images of a table, or virtual ones, and take the first batch."""
    if kind == "table":
        with (folder / f"{count}.csv").open("w") as file:
            file.write("path,label\n")
            file.writelines(f"some/folder/image_{i:09}.jpg,{i % 1000}\n" for i in range(count))
    before, start = memory(), time.process_time()
    dataset: Dataset
    if kind == "table":
        dataset = open_dataset(DataConfig("table", str(folder / f"{count}.csv"), cache="off"))
    else:
        dataset = Virtual(count)
    fingerprint(dataset)
    order = chosen_order("auto", count)
    batch_indices(count, 0, 0, 256, order)
    seconds, grown = time.process_time() - start, memory() - before
    start = time.process_time()
    for step in range(1, 101):
        batch_indices(count, 0, step, 256, order)
    return {
        "start": seconds,
        "MB": grown,
        "order": order,
        "index": (time.process_time() - start) / 25_600 * 1e6,
    }


def alone(*words: object) -> dict[str, Any]:
    """Run this program again with other words, and what it prints."""
    command = [sys.executable, __file__, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def first_images(folder: Path, out: Path, count: int) -> None:
    """Links to `count` images, as many of each class."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    for path in classes:
        (out / path.name).mkdir(parents=True)
        for file in sorted(path.iterdir())[: count // len(classes)]:
            (out / path.name / file.name).symlink_to(file.resolve())


def compared(datas: dict[str, dict[str, Any]]) -> Iterator[str]:
    plain = opened("folder", datas["folder"])
    indices = np.random.default_rng(1).integers(0, len(plain), 200).tolist()
    for form, data in datas.items():
        other = opened(form, data)
        same = all(np.array_equal(other.picture(i).pixels(), plain.picture(i).pixels()) for i in indices)
        assert same, form
        assert np.array_equal(other.labels, plain.labels), form
        yield form


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--reads", type=int, default=2_000)
    parser.add_argument("--measure", nargs=2, metavar=("FORM", "DATA"), help=argparse.SUPPRESS)
    parser.add_argument("--many", nargs=3, metavar=("N", "KIND", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        form, data = options.measure
        print(json.dumps(measure(form, json.loads(data), options.reads)))
        return
    if options.many:
        print(json.dumps(many(int(options.many[0]), options.many[1], Path(options.many[2]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        os.environ["XDG_CACHE_HOME"] = os.environ["HF_HOME"] = str(place / "cache")
        first_images(options.images, place / "images", options.count)
        datas = {}
        for form in FORMS:
            if form == "shards":
                write_shards(place / "images", place / "shards", SHARDS)
                datas[form] = {"name": "shards", "root": str(place / "shards")}
            elif form in ("folder", "python"):
                datas[form] = {"name": "folder", "root": str(place / "images")}
            else:
                found = as_form(place / "images", form, place / form)
                datas[form] = {"name": found.name, "root": found.root}
        alone("--measure", "shards", json.dumps(datas["shards"]), "--reads", 1)  # its index is made once
        print(f"{options.count:,} images; the same pixels in 200 random ones: {', '.join(compared(datas))}\n")
        print("| source | start s | start MB | µs encoded | µs decoded | other reader | µs decoded |")
        print("|---|---|---|---|---|---|---|")
        for form, data in datas.items():
            f = alone("--measure", form, json.dumps(data), "--reads", options.reads)
            other = f"{f['reader']} | {f['theirs']:.0f}" if f.get("theirs") else "– | –"
            print(
                f"| {form} | {f['start']:.2f} | {f['MB']:.0f} | {f['read']:.1f} | {f['decoded']:.1f} | {other} |"
            )
        print("\n| images | of | start s | start MB | order | µs per index |\n|---|---|---|---|---|---|")
        for count, kind in [*((n, "table") for n in MANY), *((n, "virtual") for n in (10**7, 10**8, 10**9))]:
            f = alone("--many", count, kind, place)
            print(
                f"| {count:,} | {kind} | {f['start']:.2f} | {f['MB']:.0f} | {f['order']} | {f['index']:.2f} |"
            )


if __name__ == "__main__":
    main()
