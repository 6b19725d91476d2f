"""Decoded images in one memory-mapped file: when there is one, where it is, and reading it."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from momentum2.config import Cache
from momentum2.data.dataset import Dataset, Ints
from momentum2.data.images import Array, BadImage, Picture, Pixels
from momentum2.data.packing import decode, pack
from momentum2.errors import SettingError
from momentum2.files import locked

_FORMAT = 1  # part of the key: raise it when other pixels come out of the same files
_SHARE = 0.25  # of the memory: the largest cache that auto makes


class Packed(Dataset):
    """A data set whose pixels are in a cache."""

    in_memory = True

    def __init__(self, source: Dataset, folder: Path) -> None:
        super().__init__(source.names, source.labels, source.class_names)
        self.folder = folder
        self.index: Ints = np.load(folder / "index.npy", allow_pickle=False)
        manifest = json.loads((folder / "manifest.json").read_text())
        self.bad = {int(index): str(reason) for index, reason in manifest["bad"].items()}
        readable = np.delete(np.arange(len(self)), list(self.bad))
        if len(readable):
            # In place of a bad image comes the next readable one, after the last comes the first.
            self._taken = readable[np.searchsorted(readable, np.arange(len(self))) % len(readable)]
            sizes = np.unique(self.index[readable, 1:], axis=0)
            self.fixed_size = (int(sizes[0, 0]), int(sizes[0, 1])) if len(sizes) == 1 else None

    @cached_property
    def _pixels(self) -> NDArray[np.uint8]:
        return np.asarray(np.memmap(self.folder / "pixels.bin", np.uint8, "r"))

    def __getstate__(self) -> dict[str, Any]:
        # Each process maps the file itself.
        return {name: value for name, value in self.__dict__.items() if name != "_pixels"}

    def picture(self, index: int) -> Picture:
        if index in self.bad:
            raise BadImage(self.bad[index])
        start, height, width = self.index[index].tolist()
        return Array(self._pixels[start : start + height * width * 3].reshape(height, width, 3))

    def stamp(self, index: int) -> str:
        return self.names[index]

    def fetch(self, indices: Iterable[int]) -> tuple[Ints, list[Pixels] | Pixels]:
        if self.fixed_size is None:
            return super().fetch(indices)
        taken = self._taken[np.asarray(indices, np.int64)]
        images = self._pixels.reshape(-1, *self.fixed_size, 3)
        return taken, np.take(images, self.index[taken, 0] // images[0].size, axis=0)


def packed(dataset: Dataset, kind: str, cache: Cache, directory: str | None) -> Dataset:
    """`dataset` from its cache, which is made if needed; the data set itself if it is not cached."""
    if cache == "off" or dataset.in_memory:
        return dataset
    base = Path(directory).expanduser() if directory else _user_cache()
    estimate = _decoded_bytes(dataset)
    if cache == "auto" and estimate > _SHARE * _memory():
        return dataset
    folder = base / f"{kind}-{_key(dataset)}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with locked(base / f"{folder.name}.lock"):
            if not _is_whole(folder, dataset):
                if not _fits(base, estimate, cache):
                    return dataset
                pack(dataset, folder, estimate)
    except OSError as error:
        if cache == "auto":
            logging.getLogger("momentum2").warning("The images are not cached (%s).", error)
            return dataset
        raise SettingError(
            "data.cache_dir",
            f"{base} cannot be written ({error}). Choose another folder, or turn the cache off.",
        ) from error
    return Packed(dataset, folder)


def _user_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "momentum2"


def _memory() -> int:
    """Bytes of memory of this machine or container (what is free may differ when a run is resumed)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdecimal() else total


def _decoded_bytes(dataset: Dataset) -> int:
    """Exact where all images have one size, else estimated from a few of them."""
    if dataset.fixed_size is not None:
        return len(dataset) * dataset.fixed_size[0] * dataset.fixed_size[1] * 3
    sizes = []
    for index in np.linspace(0, len(dataset) - 1, min(len(dataset), 64)).astype(int).tolist():
        try:
            height, width = dataset.picture(index).size
            sizes.append(height * width * 3)
        except BadImage:
            continue
    return int(np.mean(sizes) * len(dataset)) if sizes else 0


def _fits(base: Path, estimate: int, cache: Cache) -> bool:
    free = shutil.disk_usage(base).free
    if estimate * 1.05 < free:
        return True
    if cache == "auto":
        return False
    raise SettingError(
        "data.cache_dir",
        f"{base} has {free / 1e9:.1f} GB free, but the decoded images need about {estimate / 1e9:.1f} GB. Choose "
        "another folder, or turn the cache off.",
    )


def _key(dataset: Dataset) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {len(dataset)}".encode())
    for index in range(len(dataset)):
        digest.update(dataset.stamp(index).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()[:24]


def _is_whole(folder: Path, dataset: Dataset) -> bool:
    """Whether the cache is there in full, and what could not be read still cannot (a network may heal)."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        if (folder / "pixels.bin").stat().st_size != manifest["bytes"]:
            return False
        return all(decode(dataset, int(index))[0] is None for index in manifest["bad"])
    except (OSError, ValueError, KeyError):
        return False
