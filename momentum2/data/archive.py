"""A .tar or .zip of images, read in place."""

import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from momentum2.data.dataset import Dataset, Ints
from momentum2.data.images import BadImage, Encoded, refuse_large
from momentum2.data.layout import choose_split, images_among, is_hidden, labels_from_folders, split_word
from momentum2.errors import SettingError, UserError, reason
from momentum2.files import version
from momentum2.terminal import progress

#: How many times larger than in its archive an image can be: most formats are compressed already. Smaller ones may.
_MOST_INFLATED, _HARMLESS = 100, 64 << 20
#: What tarfile and zipfile raise for archives that are damaged, or made to confuse them.
DAMAGE = (
    *(OSError, EOFError, ValueError, KeyError, IndexError, OverflowError, RuntimeError, struct.error),
    *(zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile),
)


class Archive(Dataset):
    """Images inside a .tar or .zip, read in place.

    `places` is (n, 2), a member's first byte (in a tar) or number (in a zip) and its size.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        places: Ints,
        labels: Ints | None,
        classes: Iterable[str] | None,
    ) -> None:
        super().__init__(names, labels, classes)
        self.path, self.places = path, places
        self.is_zip = zipfile.is_zipfile(path)
        self.version = version(path)

    def picture(self, index: int) -> Encoded:
        place, size = self.places[index].tolist()
        refuse_large(size)
        try:
            data = self._from_zip(place) if self.is_zip else self._from_tar(place, size)
        except DAMAGE as error:
            raise BadImage(reason(error)) from error
        return Encoded(data, self.reading)

    def stamp(self, index: int) -> str:
        return f"{self.names[index]}\0{self.places[index]}\0{self.version}"

    def _from_tar(self, start: int, size: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(start)
            data = file.read(size)
        if len(data) < size:
            raise BadImage("the archive ends before this member does")
        return data

    def _from_zip(self, number: int) -> bytes:
        member = self._zip.infolist()[number]
        if member.file_size > max(_HARMLESS, _MOST_INFLATED * member.compress_size):
            raise BadImage(
                f"{member.file_size:,} bytes in {member.compress_size:,}, refused as a decompression bomb"
            )
        return self._zip.read(member)

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path)

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the file itself.
        return {name: value for name, value in self.__dict__.items() if name != "_zip"}


def open_archive(path: Path, split: str) -> Archive:
    """Images in an uncompressed .tar or a .zip; folders inside mean what they mean on disk."""
    if not path.is_file():
        raise SettingError("data.root", f"{path} is not a file. Pass a .tar or .zip.")
    with progress("Listing the archive", None, "members") as advance:
        members = []
        for member in (_zip_members if zipfile.is_zipfile(path) else _tar_members)(path):
            advance(1)
            if not any(is_hidden(part) for part in member[0].split("/")):
                members.append(member)
    images = set(images_among((name for name, _, _ in members), str(path)))
    members = [member for member in members if member[0] in images]
    if not members:
        raise SettingError(
            "data.root",
            f"{path} contains no images. It should contain files ending in .jpg, .png or similar.",
        )
    members.sort()
    names = [name for name, _, _ in members]
    top = names[0].split("/")[0] + "/"
    base = top if split_word(top[:-1]) is None and all(name.startswith(top) for name in names) else ""
    paths = [name[len(base) :].split("/") for name in names]
    folder = choose_split({parts[0] for parts in paths if len(parts) > 1}, split, str(path))
    classes: set[str] = set()
    if folder:
        classes.update(parts[1] for parts in paths if split_word(parts[0]) and len(parts) > 2)
    depth = 1 if folder else 0
    chosen = [i for i, parts in enumerate(paths) if not folder or parts[0] == folder]
    labels, class_names = labels_from_folders(["/".join(paths[i][depth:]) for i in chosen], classes)
    places = np.array([members[i][1:] for i in chosen], np.int64)
    return Archive(path, [names[i] for i in chosen], places, labels, class_names)


def _zip_members(path: Path) -> Iterator[tuple[str, int, int]]:
    try:
        with zipfile.ZipFile(path) as file:
            for number, member in enumerate(file.infolist()):
                if not member.is_dir():
                    yield member.filename.removeprefix("./"), number, member.file_size
    except DAMAGE as error:
        raise UserError(f"{path} is damaged ({error}). Create or download it again.") from error


def _tar_members(path: Path) -> Iterator[tuple[str, int, int]]:
    try:
        with tarfile.open(path, "r:") as file:
            for member in file:
                data = file.getmember(member.linkname) if member.islnk() else member
                if data.isreg() and 0 <= data.size < 2**62 and not data.issparse():
                    yield member.name.removeprefix("./"), data.offset_data, data.size
    except DAMAGE as error:
        raise UserError(
            f"{path} cannot be read in place ({error}). Use a .zip or an uncompressed .tar; decompress a .tar.gz or "
            ".tar.xz first, for example with gunzip or unxz."
        ) from error
