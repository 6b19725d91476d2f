"""Decoded images in one memory-mapped file: when there is one, where it is, and reading it."""

import hashlib
import io
import logging
import os
import shutil
import stat
import tokenize
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache as cache_calls
from functools import cached_property
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from momentum2.config import Cache
from momentum2.data.dataset import Dataset, Ints
from momentum2.data.images import MAX_PIXELS, Array, BadImage, Picture, Pixels
from momentum2.data.looking import some_sizes
from momentum2.data.packing import BLOCK, decode, pack
from momentum2.errors import SettingError
from momentum2.files import at_home, locked, read, read_json
from momentum2.machine import memory

_FORMAT = 2  # part of the key: raise it when other pixels come out of the same files
#: What reading a cache that is damaged or foreign can raise.
_DAMAGE = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, SyntaxError, OverflowError),
    *(MemoryError, tokenize.TokenError),  # numpy reads a header as Python
)
_LARGEST = 10_000_000  # images
_SHARE = 0.25  # of the memory: the largest cache that auto makes


class Packed(Dataset):
    """A data set whose pixels are in a cache."""

    in_memory = True

    def __init__(self, source: Dataset, content: "Content") -> None:
        super().__init__(source.names, source.labels, source.class_names)
        self.source, self.folder, self.index = source, content.folder, content.index
        self.reading = source.reading
        self.bad = dict(content.bad)
        self._blocks, self._seen = content.blocks, np.zeros(len(content.blocks), bool)
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

    def _is_sound(self, indices: Ints) -> bool:
        """Whether the pixels of these images are as they were written; each block is looked at once."""
        if self._seen.all():
            return True
        first = self.index[indices, 0]
        last = first + np.maximum(self.index[indices, 1:].prod(1) * self.channels, 1) - 1
        blocks = {b for a, z in zip(first // BLOCK, last // BLOCK, strict=True) for b in range(a, z + 1)}
        for block in blocks:
            if not self._seen[block]:
                if crc32(self._pixels[block * BLOCK : (block + 1) * BLOCK].data) != self._blocks[block]:
                    _distrust(self.folder)
                    return False
                self._seen[block] = True
        return True

    def picture(self, index: int) -> Picture:
        if index in self.bad:
            raise BadImage(self.bad[index])
        if not self._is_sound(np.array([index])):
            return Array(self.source.picture(index).pixels())
        start, height, width = self.index[index].tolist()
        return Array(self._pixels[start : start + height * width * self.channels].reshape(height, width, -1))

    def stamp(self, index: int) -> str:
        return self.names[index]

    def fetch(self, indices: Iterable[int]) -> tuple[Ints, list[Pixels] | Pixels]:
        if self.fixed_size is None:
            return super().fetch(indices)
        taken = self._taken[np.asarray(indices, np.int64)]
        if not self._is_sound(taken):
            return super().fetch(indices)
        images = self._pixels.reshape(-1, *self.fixed_size, self.channels)
        return taken, np.take(images, self.index[taken, 0] // images[0].size, axis=0)


def packed(dataset: Dataset, kind: str, cache: Cache, directory: str | None) -> Dataset:
    """`dataset` from its cache, which is made if needed; the data set itself if it is not cached."""
    if cache == "off" or dataset.in_memory:
        return dataset
    base = cache_folder(directory)
    if cache == "auto" and len(dataset) > _LARGEST:  # its key alone would take minutes
        return dataset
    estimate = _decoded_bytes(dataset)
    if cache == "auto" and estimate > _SHARE * memory():
        return dataset
    folder = base / f"{kind}-{_key(dataset)}"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with locked(base / f"{folder.name}.lock"):
            content = _read(folder, dataset)
            if content is None:
                if not _fits(base, estimate, cache):
                    return dataset
                pack(dataset, folder, estimate)
                content = _read(folder, dataset)
    except OSError as error:
        if cache == "auto":
            logging.getLogger("momentum2").warning("The images are not cached (%s).", error)
            return dataset
        raise SettingError(
            "data.cache_dir",
            f"{base} cannot be written ({error}). Choose another folder, or turn the cache off.",
        ) from error
    return dataset if content is None else Packed(dataset, content)


def cache_folder(directory: str | None) -> Path:
    """Where caches are: in `data.cache_dir`, or in the user's cache folder."""
    if directory:
        return at_home(directory)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "momentum2"


def _decoded_bytes(dataset: Dataset) -> int:
    """Exact where all images have one size, else estimated from a few of them."""
    if dataset.fixed_size is not None:
        return len(dataset) * dataset.fixed_size[0] * dataset.fixed_size[1] * dataset.channels
    pixels = [height * width for height, width in some_sizes(dataset)]
    return int(np.mean(pixels) * len(dataset) * dataset.channels) if pixels else 0


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
    digest = hashlib.sha256(f"{_FORMAT} {len(dataset)} {dataset.reading}".encode())
    for index in range(len(dataset)):
        digest.update(dataset.stamp(index).encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()[:24]


@dataclass(frozen=True)
class Content:
    """What a cache says about itself."""

    folder: Path
    index: Ints  # (n, 3): first byte, height, width
    blocks: NDArray[np.int64]  # checksums of `pixels.bin`
    bad: dict[int, str]


def _read(folder: Path, dataset: Dataset) -> Content | None:
    """What is in a cache, if it is ours, whole and consistent, and what could not be read still cannot.

    Nothing in it is believed that a checksum or the size of the data set can refute: whatever is wrong means that the
    cache is made anew.
    """
    try:
        found = _checked(folder, len(dataset), dataset.channels)
        # A network may heal.
        return found if all(decode(dataset, index)[0] is None for index in found.bad) else None
    except _DAMAGE:
        return None


def _checked(folder: Path, count: int, channels: int) -> Content:
    for path in (folder, folder / "pixels.bin", folder / "index.npy", folder / "manifest.json"):
        if path.lstat().st_uid not in (os.getuid(), 0):
            raise ValueError("it belongs to somebody else")
    manifest = read_json(folder / "manifest.json")
    size, blocks = int(manifest["bytes"]), np.array(manifest["blocks"], np.int64)
    pixels = (folder / "pixels.bin").lstat()
    if not stat.S_ISREG(pixels.st_mode) or pixels.st_size != size or blocks.shape != (-(-size // BLOCK),):
        raise ValueError("pixels.bin has a different size")
    data = read(folder / "index.npy", 1000 + 24 * count)
    if hashlib.sha256(data).hexdigest() != manifest["index"]:
        raise ValueError("index.npy has changed")
    index: Ints = np.load(io.BytesIO(data), allow_pickle=False)
    if index.shape != (count, 3) or index.dtype != np.int64 or index.min(initial=0) < 0:
        raise ValueError("index.npy belongs to other images")
    if index[:, 0].max(initial=0) > size or index[:, 1:].max(initial=0) > MAX_PIXELS:
        raise ValueError("index.npy has numbers that no image has")
    if (index[:, 0] + index[:, 1:].prod(1) * channels).max(initial=0) > size:
        raise ValueError("index.npy leaves pixels.bin")
    bad = {int(number): str(reason) for number, reason in manifest["bad"].items()}
    if not all(0 <= number < count for number in bad):
        raise ValueError("manifest.json belongs to other images")
    return Content(folder, index, blocks, bad)


@cache_calls
def _distrust(folder: Path) -> None:
    """Have a damaged cache made anew at the next start, and say so, once."""
    with suppress(OSError):
        (folder / "manifest.json").unlink()
    logging.getLogger("momentum2").warning(
        "The cache %s is damaged. Images are read from their files; the next start makes it again.",
        folder,
    )
