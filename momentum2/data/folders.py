"""Data sets of image files: a folder, the ImageNet layout, a list of paths."""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path

import numpy as np

from momentum2.data.dataset import Dataset, Ints
from momentum2.data.images import ARRAY_SUFFIXES, SUFFIXES, BadImage, Encoded, refuse_large
from momentum2.data.layout import (
    HIDDEN,
    choose_split,
    images_among,
    is_array,
    is_image,
    labels_from_folders,
    labels_from_words,
    split_word,
)
from momentum2.errors import SettingError, UserError
from momentum2.files import read, version
from momentum2.terminal import progress

_MOST_WAYS = 100  # that links may lead to one folder
_LISTED = (*SUFFIXES, *ARRAY_SUFFIXES)


class Files(Dataset):
    """Image files below a folder; names are their paths from there."""

    def __init__(self, root: Path, names: Iterable[str], labels: Ints | None, classes: Iterable[str] | None):
        super().__init__(names, labels, classes)
        self.root = str(root)

    def picture(self, index: int) -> Encoded:
        try:
            with open(os.path.join(self.root, self.names[index]), "rb", opener=_open_at_once) as file:
                found = os.fstat(file.fileno())
                if not stat.S_ISREG(found.st_mode):
                    raise BadImage("not a regular file")
                refuse_large(found.st_size)
                return Encoded(file.read(), self.reading)
        except (OSError, ValueError) as error:  # ValueError: of a name that no file can have
            raise BadImage(getattr(error, "strerror", None) or str(error)) from error

    def stamp(self, index: int) -> str:
        name = self.names[index]
        try:
            return f"{name}\0{version(os.path.join(self.root, name))}"
        except (OSError, ValueError):
            return f"{name}\0missing"


def open_folder(root: Path, split: str) -> Files:
    """All images below `root`/`split`, or below `root` if it has no splits; classes are the folders there."""
    if not root.is_dir():
        raise SettingError("data.root", f"{root} is not a folder. Pass the folder of images.")
    folder = choose_split(subfolders(root), split, str(root))
    inside = _listed(root / folder)
    together = "\n".join(inside).lower()
    if any(suffix in together for suffix in ARRAY_SUFFIXES):  # a glance, where the names are many
        inside = images_among(inside, str(root / folder))
    if not inside:
        raise SettingError("data.root", f"{root / folder} contains no images ({_what_is_in(root / folder)}).")
    classes: set[str] = set()
    if folder:  # the same numbering in every split, also where one lacks a class
        classes.update(*(subfolders(root / other) for other in subfolders(root) if split_word(other)))
    labels, class_names = labels_from_folders(inside, classes)
    return Files(root, (f"{folder}/{name}" if folder else name for name in inside), labels, class_names)


def open_imagenet(root: Path, split: str) -> Files:
    """ImageNet as it is usually laid out: train/ and val/ with one folder per class; "test" is val."""
    if split == "test" and (root / "val").is_dir() and not (root / "test").is_dir():
        split = "val"
    files = open_folder(root, split)
    if files.labels is None:
        raise SettingError(
            "data.root",
            f"{root} is not in ImageNet's layout: some images are outside class folders. Move them into "
            f'{root}/{split}/CLASS/, or use the data set "folder".',
        )
    return files


def open_list(path: Path, split: str) -> Files:
    """Paths in a text file, one per line, each optionally followed by a label; relative to the file.

    `path` is the file, or a folder with one file per split (train.txt, test.txt).
    """
    lists = {file.stem: file for file in sorted(path.glob("*.txt"))} if path.is_dir() else {"train": path}
    if split not in lists or not lists[split].is_file():
        raise SettingError(
            "data.root",
            f"{path} has no list of images for split {split!r} (found: {', '.join(lists) or 'no .txt file'}). "
            f"Pass a text file of paths, or a folder with {split}.txt.",
        )
    rows = {name: _read_list(file) for name, file in lists.items()}
    words = [label or "" for part in rows.values() for _, label in part]
    where = np.flatnonzero([name == split for name, part in rows.items() for _ in part])
    labels, classes = labels_from_words(words, where, str(lists[split]))
    return Files(lists[split].parent, (name for name, _ in rows[split]), labels, classes)


def _read_list(path: Path) -> list[tuple[str, str | None]]:
    try:
        lines = read(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a list of paths ({error}).") from error
    rows = [_path_and_label(line.strip()) for line in lines if line.strip()]
    if not rows:
        raise UserError(f"The list {path} is empty. Write one image path per line.")
    return rows


def _path_and_label(line: str) -> tuple[str, str | None]:
    """A label follows a tab, or a space if the line does not end like an image's name."""
    if "\t" in line:
        name, label = line.rsplit("\t", 1)
        return name.strip(), label.strip()
    if is_image(line) or is_array(line) or " " not in line:
        return line, None
    name, label = line.rsplit(None, 1)
    return name, label


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a named pipe would wait for a writer forever


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            seen = [entry for entry in entries if not entry.name.startswith(HIDDEN)]
            return sorted(seen, key=attrgetter("name"))
    except OSError as error:
        raise UserError(f"The folder {folder} cannot be listed ({error.strerror}).") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # of a link to itself
        return False


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder."""
    return [entry.name for entry in _entries(folder) if _is_folder(entry)]


def _listed(folder: Path) -> list[str]:
    """What `walk` finds, telling on the way how much that is."""
    names: list[str] = []
    with progress("Listing images", None, "images") as advance:
        for found in walk(folder):
            names += found
            advance(len(found))
    return names


def walk(folder: Path | str) -> Iterator[list[str]]:
    """Paths of the images and arrays below `folder` in a fixed order, those that are beside each other at a time.

    A link back to a folder above is not followed. A few links beside each other can lead to one folder in millions of
    ways: more than some are a `UserError`.
    """
    ways = Counter[tuple[int, int]]()
    waiting: list[list[str] | tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        files = waiting.pop()
        if isinstance(files, list):
            yield files
            continue
        name, above = files
        place = os.path.join(folder, name)
        entries, before = _entries(place), f"{name}/" if name else ""
        found = os.stat(place)
        identity = found.st_dev, found.st_ino
        if identity in above:
            continue
        ways[identity] += 1
        if ways[identity] > _MOST_WAYS:
            raise UserError(
                f"Links lead to the folder {place} in more than {_MOST_WAYS} ways. Remove some of them."
            )
        here = above | {identity}
        beside: list[str] = []
        inside: list[list[str] | tuple[str, frozenset[tuple[int, int]]]] = [beside]
        for entry in entries:
            if _is_folder(entry):
                beside = []
                inside += (before + entry.name, here), beside
            elif entry.name.lower().endswith(_LISTED):
                beside.append(before + entry.name)
        waiting += [part for part in reversed(inside) if part]


def _what_is_in(folder: Path) -> str:
    found = [entry.name + "/" if _is_folder(entry) else entry.name for entry in _entries(folder)]
    if not found:
        return "the folder is empty"
    return "found " + ", ".join(found[:5]) + (f" and {len(found) - 5:,} more" if len(found) > 5 else "")
