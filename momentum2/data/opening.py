"""From a config section to a data set."""

import os
import re
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from momentum2.config import DataConfig, DataName
from momentum2.data import shapes
from momentum2.data.archive import open_archive
from momentum2.data.binary import open_cifar, open_stl10
from momentum2.data.cache import packed
from momentum2.data.columns import has_header, has_images, open_table
from momentum2.data.dataset import Dataset, FixedSize, Ints, Subset
from momentum2.data.folders import open_folder, open_imagenet, open_list, subfolders, walk
from momentum2.data.hub import open_hf
from momentum2.data.images import Pixels
from momentum2.data.layout import no_split, split_word
from momentum2.data.looking import check_reading, reading_of, some_sizes
from momentum2.data.remote import check_url, fetch, is_remote
from momentum2.data.sampler import seeded_subset
from momentum2.data.shards import find_shards, open_shards
from momentum2.errors import SettingError, UserError
from momentum2.files import at_home, files_below, locked

#: What a folder without images is, by the files in it.
_KINDS: dict[DataName, str] = {"shards": ".tar", "hf": ".parquet", "table": ".csv"}
#: Number of images of `shapes` in each split.
SHAPES = {"train": 20_000, "test": 4_000}


class Shapes(FixedSize):
    """The drawn data set at one image size; it is the same everywhere, whatever the run's seed."""

    def __init__(self, split: str, size: int) -> None:
        if split not in SHAPES:
            raise no_split("shapes", split, SHAPES)
        everything = np.arange(SHAPES[split])
        labels = shapes.labels(everything, split=split)
        super().__init__((f"{split}/{i:05d}" for i in everything), labels, shapes.CLASS_NAMES)
        self.split = split
        self.fixed_size = size, size

    def gather(self, indices: Ints) -> Pixels:
        assert self.fixed_size is not None
        return shapes.render(indices, self.fixed_size[0], split=self.split)

    def stamp(self, index: int) -> str:
        return f"{self.names[index]} {self.fixed_size} {self._style}"

    @cached_property
    def _style(self) -> int:
        """Other drawings, other number."""
        return zlib.crc32(self.gather(np.arange(10)).tobytes())


def open_dataset(data: DataConfig, split: str | None = None, seed: int = 0) -> Dataset:
    """The images of a config section, ready to be read: from their cache if they have one.

    Args:
        data: What and where.
        split: Another part than `data.split`, such as `data.test_split`. Of images that are not divided, "80%"
            is that share in a fixed shuffled order, and "-20%" the rest.
        seed: Of the order from which `data.train_size` takes its images (it concerns `data.split` only).
    """
    part = data.split if split is None else split
    if data.download and data.name != "hf":
        _download(data)
    share = re.fullmatch(r"(-?)(\d{1,2})%", part)
    dataset = open_unchecked(data, "train" if share else part)
    check_reading(dataset)
    if share:
        dataset = Subset(dataset, _share(len(dataset), int(share[2]), last=bool(share[1])))
    if data.train_size is not None and part == data.split:
        if not 1 <= data.train_size <= len(dataset):
            raise SettingError(
                "data.train_size",
                f"must be from 1 to {len(dataset):,}, the number of images, not {data.train_size:,}.",
            )
        dataset = Subset(dataset, seeded_subset(len(dataset), seed, data.train_size))
    dataset = packed(dataset, data.name, data.cache, data.cache_dir)
    dataset.max_bad_fraction = data.max_bad_fraction
    return dataset


def open_unchecked(data: DataConfig, split: str) -> Dataset:
    """The images of one split, whatever values they have; nobody has looked at any of them."""
    dataset = _open(data, split)
    if isinstance(dataset, FixedSize) and data.channels != dataset.channels:
        raise SettingError(
            "data.channels",
            f'is {data.channels}, but the images of "{data.name}" have {dataset.channels}. Leave it out.',
        )
    dataset.reading = reading_of(data)
    return dataset


def _share(length: int, percent: int, last: bool) -> Ints:
    """The first or last `percent` of one fixed shuffled order: the first 80 and the last 20 never overlap."""
    first = seeded_subset(length, 0, round(length * (100 - percent if last else percent) / 100))
    return np.setdiff1d(np.arange(length), first) if last else first


def _open(data: DataConfig, split: str) -> Dataset:
    if data.name == "shapes":
        return Shapes(split, data.image_size)
    if data.name in ("shards", "hf", "archive") and data.root and is_remote(data.root):
        return _open_fetched(data, split, fetch(data.root, data.cache_dir))
    if data.name == "hf":
        return open_hf(data, split)
    if data.name == "shards" and data.root:
        return open_shards(find_shards(data.root), data.root, split, data.cache_dir)
    root = _root(data)
    match data.name:
        case "folder":
            return open_folder(root, split)
        case "imagenet":
            return open_imagenet(root, split)
        case "archive":
            return open_archive(root, split)
        case "list":
            return open_list(root, split)
        case "table":
            return open_table(root, split, data.image_column, data.label_column)
        case "cifar10" | "cifar100":
            return open_cifar(root, split, 10 if data.name == "cifar10" else 100)
        case "stl10":
            return open_stl10(root, split)
    raise SettingError("data.name", "is not set. Choose a data set, and set root to its folder or file.")


def _open_fetched(data: DataConfig, split: str, files: list[Path]) -> Dataset:
    """What was fetched, as if it had been here."""
    if data.name == "shards":
        return open_shards(files, data.root or "", split, data.cache_dir)
    if data.name == "hf":
        folder = str(files[0]) if len(files) == 1 else os.path.commonpath([file.parent for file in files])
        return open_hf(replace(data, root=folder), split)
    if len(files) > 1:
        raise SettingError(
            "data.root", f'{data.root} is {len(files)} archives. Several are read by the data set "shards".'
        )
    return open_archive(files[0], split)


def _root(data: DataConfig) -> Path:
    if data.root is None and data.name != "none":
        raise SettingError("data.root", f'is required for the data set "{data.name}".')
    if data.root == "":
        raise SettingError("data.root", "is empty. Set it to the folder or file of the images.")
    if is_remote(data.root):
        check_url(data.root)
        raise SettingError(
            "data.root",
            f'{data.root} is a URL, which the data set "{data.name}" cannot read. Pack the images into .tar files, and '
            'set name to "shards".',
        )
    root = at_home(data.root or ".")
    if not root.exists():
        raise SettingError("data.root", f"{root} does not exist.")
    return root


def _download(data: DataConfig) -> None:
    """Have torchvision fetch and unpack (but not unpickle) the published archive, if it is not there."""
    from momentum2._torchvision import torchvision

    datasets = torchvision.datasets
    sources = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100, "stl10": datasets.STL10}
    if data.name not in sources:
        raise SettingError("data.download", f'is not possible for the data set "{data.name}". Leave it out.')
    if data.root is None:
        raise SettingError("data.root", f"is required to download {data.name}. Set it to a folder.")
    source, root = sources[data.name], at_home(data.root)
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".download.lock"):
        if (root / source.base_folder).is_dir():
            return
        try:
            datasets.utils.download_and_extract_archive(
                source.url, root, filename=source.filename, md5=source.tgz_md5
            )
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{data.name} could not be downloaded from {source.url} ({error}). "
                f"Check the network, or download the file yourself and unpack it in {root}."
            ) from error


def typical_size(dataset: Dataset) -> int:
    """The usual crop size that suits the median short side of (up to 64 of) the images."""
    sides = [min(size) for size in some_sizes(dataset)]
    side = median(sides) if sides else 224
    return next((size for size in (32, 64, 96, 128, 160) if side < size * 1.4), 224)


def test_split_of(data: DataConfig) -> str | None:
    """The part of the images that is meant for testing, if there is one: `data.test_split`, or what is called val."""
    for split in dict.fromkeys((data.test_split, "test", "val", "validation", "valid")):
        with suppress(UserError):
            open_unchecked(data, split)
            return split
    return None


def find_data(source: str, data: DataConfig) -> DataConfig:
    """`data` with the kind and root of `source`: shapes, a folder, an archive, a list, a table, shards or a URL."""
    if source == "shapes":
        return replace(data, name="shapes", root=None, split="train", test_split="test", train_size=None)
    check_url(source)
    path = Path(source)
    if not source or not (is_remote(source) or path.exists() or source.endswith(".tar")):
        missing = f"{source} does not exist. " if source else ""
        raise UserError(
            f'{missing}Pass a folder of images, an archive, a list, a table, shards, a URL of them, or "shapes".'
        )
    kind = _kind_of(source)
    data = replace(data, name=kind, root=source, split="train", test_split="test", train_size=None)
    if kind == "folder":
        folders = [split_word(name) for name in subfolders(path)]
        if "test" not in folders and "val" in folders:
            data = replace(data, test_split="val")
    elif kind not in ("list", "archive"):
        data = replace(data, test_split=test_split_of(data) or "test")
    return data


def _kind_of(source: str) -> DataName:
    path, suffix = Path(source), Path(source).suffix
    if is_remote(source):
        return "archive" if suffix == ".zip" else "hf" if suffix == ".parquet" else "shards"
    if path.is_dir():
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return "hf"
        if next(walk(path), None) is not None:
            return "folder"
        for kind, suffix in _KINDS.items():
            if next(files_below(path, suffix), None) is not None:
                return kind
        return "folder"
    if suffix == ".parquet":
        return "hf" if has_images(path) else "table"
    if suffix == ".csv" or (suffix == ".tsv" and has_header(path)):
        return "table"
    if suffix in (".txt", ".lst", ".tsv"):
        return "list"
    return "archive" if path.is_file() else "shards"
