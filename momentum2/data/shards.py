"""WebDataset shards: many .tar files whose members are read in place, in any order. Nothing in them is unpickled."""

import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from momentum2.data.archive import DAMAGE
from momentum2.data.cache import cache_folder
from momentum2.data.dataset import Chosen, Dataset, Ints, Names
from momentum2.data.images import BadImage, Encoded, refuse_large
from momentum2.data.layout import is_array, is_hidden, is_image, labels_from_words, no_split, split_in
from momentum2.data.workers import Workers
from momentum2.errors import SettingError, UserError
from momentum2.files import at_home, files_below, locked, open_regular, parse_json, real, version, write_whole
from momentum2.machine import allowed_cores
from momentum2.terminal import progress

_FORMAT = 1  # of the index; part of its key
_LARGEST_LABEL = 1 << 20  # bytes
_LABELS = ("label", "cls", "class")  # keys of a sample's .json


class Shards(Dataset):
    """The samples of some shards that have an image, in their order.

    `places` is (n, 3): which shard, the image's first byte there, and its size.
    """

    def __init__(
        self,
        files: Sequence[Path],
        names: Sequence[str],
        places: Ints,
        labels: Ints | None,
        classes: Iterable[str] | None,
    ) -> None:
        super().__init__(names, labels, classes)
        self.files, self.places = tuple(map(str, files)), places
        self.versions = tuple(map(version, self.files))

    def picture(self, index: int) -> Encoded:
        shard, start, size = self.places[index].tolist()
        refuse_large(size)
        try:
            data = os.pread(_opened(self.files[shard], self.versions[shard], os.getpid()).number, size, start)
        except OSError as error:
            raise BadImage(error.strerror or str(error)) from error
        if len(data) < size:
            raise BadImage("the shard ends before this member does")
        return Encoded(data, self.reading)

    def stamp(self, index: int) -> str:
        return f"{self.names[index]}\0{self.places[index]}\0{self.versions[self.places[index, 0]]}"


class _Opened:
    """A shard that is open for reading until nobody needs it."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=128)
def _opened(path: str, known: str, process: int) -> _Opened:
    """Each process opens a shard once, unless there are more of them than files may be open."""
    if version(path) != known:
        raise BadImage("the shard has changed since it was opened")
    return _Opened(path)


def open_shards(files: Sequence[Path], root: str, split: str, cache_dir: str | None) -> Shards:
    """The images of a split: that which the names or folders of shards say; if none says one, all are train.

    Args:
        files: All shards, in order.
        root: What the user calls them.
        split: The split.
        cache_dir: Where the index is kept.
    """
    if not files:
        raise SettingError(
            "data.root", f"{root} has no shards. Pass a folder of .tar files, or a pattern of them."
        )
    base = Path(os.path.commonpath([file.parent for file in files]))
    names = [file.relative_to(base).as_posix() for file in files]
    splits = [split_in(name) for name in names]
    known = sorted({found for found in splits if found})
    if split not in (known or ["train"]):
        raise no_split(root, split, known)
    index = _indexed(files, names, cache_folder(cache_dir))
    ours = np.array([not known or found == split for found in splits])
    chosen = np.flatnonzero(ours[index.places[:, 0]])
    if not len(chosen):
        raise SettingError(
            "data.root",
            f"{root} has no images in its shards. Their members should end in .jpg, .png or similar.",
        )
    labels, classes = labels_from_words(index.labels, chosen, root)
    return Shards(files, Chosen(index.names, chosen), index.places[chosen], labels, classes)


class _Index(NamedTuple):
    names: Names
    places: Ints  # (n, 3)
    labels: list[str]  # an empty string for none


class _Sample(NamedTuple):
    name: str
    start: int
    size: int
    label: str


def _indexed(files: Sequence[Path], names: Sequence[str], base: Path) -> _Index:
    """What is in the shards: from the cache, or read once and kept there."""
    stamps = [f"{name}\0{version(file)}" for name, file in zip(names, files, strict=True)]
    key = hashlib.sha256("\n".join([str(_FORMAT), *stamps]).encode("utf-8", "surrogateescape")).hexdigest()
    path = base / f"shards-{key[:24]}.npz"
    try:
        base.mkdir(parents=True, exist_ok=True)
        with locked(base / f"{path.name}.lock"):
            if (found := _load(path)) is None:
                found = _read(files, names)
                _save(path, found)
    except OSError as error:
        raise SettingError(
            "data.cache_dir", f"{base} cannot be written ({error}). Choose another folder."
        ) from error
    return found


def _load(path: Path) -> _Index | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = Names.of_block(arrays["text"].tobytes(), arrays["ends"])
            labels = Names.of_block(arrays["label_text"].tobytes(), arrays["label_ends"])
            return _Index(names, arrays["places"], labels[:])
    except (OSError, ValueError, KeyError, EOFError):
        return None


def _save(path: Path, index: _Index) -> None:
    labels, file = Names(index.labels), io.BytesIO()
    np.savez(
        file,
        text=np.frombuffer(index.names.text, np.uint8),
        ends=index.names.ends,
        places=index.places,
        label_text=np.frombuffer(labels.text, np.uint8),
        label_ends=labels.ends,
    )
    write_whole(path, file.getvalue())


def _read(files: Sequence[Path], names: Sequence[str]) -> _Index:
    task, count = _ReadShard(tuple(map(str, files))), min(allowed_cores(), len(files))
    total = sum(file.stat().st_size for file in files)
    found: list[tuple[str, int, int, int, str]] = []
    with progress("Indexing shards", len(files), "shards") as advance:

        def collect(results: Iterable[list[_Sample] | str]) -> None:
            for number, samples in enumerate(results):
                if isinstance(samples, str):
                    raise UserError(samples)
                found.extend((f"{names[number]}/{s.name}", number, s.start, s.size, s.label) for s in samples)
                advance(1)

        if count < 2 or total < 256 << 20:  # starting processes takes longer
            collect(map(task, range(len(files))))
        else:
            with Workers(task, count, lambda number: names[number], timeout=3600.0) as workers:
                collect(workers.map(range(len(files))))
    places = np.array([row[1:4] for row in found], np.int64).reshape(-1, 3)
    return _Index(Names(row[0] for row in found), places, [row[4] for row in found])


@dataclass(frozen=True)
class _ReadShard:
    """The workers' task: the samples of a shard, or a sentence about it."""

    files: tuple[str, ...]

    def __call__(self, number: int) -> list[_Sample] | str:
        try:
            return list(_samples(self.files[number]))
        except DAMAGE as error:
            return (
                f"{self.files[number]} cannot be read as a shard ({error}). Shards are uncompressed .tar files; "
                "decompress others first, for example with gunzip."
            )


def _samples(path: str) -> Iterator[_Sample]:
    """Members whose names are the same up to the first dot are a sample: its first image, and its .cls or .json."""
    key, images, arrays, label = "", list[_Sample](), list[_Sample](), ""
    with open_regular(Path(path)) as content, tarfile.open(fileobj=content, mode="r:") as file:
        for member in file:
            file.members = []  # type: ignore[attr-defined]  # it would keep them all
            name = member.name.removeprefix("./")
            folder, _, last = name.rpartition("/")
            stem, _, suffix = last.partition(".")
            if not member.isreg() or is_hidden(last):
                continue
            if f"{folder}/{stem}" != key:
                yield from (image._replace(label=label) for image in (images or arrays)[:1])
                key, images, arrays, label = f"{folder}/{stem}", [], [], ""
            if is_image(last) or is_array(last):
                found = _Sample(name, member.offset_data, member.size, "")
                (images if is_image(last) else arrays).append(found)
            elif suffix in ("cls", "json") and not label and member.size <= _LARGEST_LABEL:
                inside = file.extractfile(member)
                label = _label(inside.read() if inside else b"", suffix)
        if os.stat(path).st_size < file.offset + tarfile.BLOCKSIZE:  # an archive ends in blocks of zeros
            raise tarfile.ReadError("it ends in the middle")
    yield from (image._replace(label=label) for image in (images or arrays)[:1])


def _label(data: bytes, suffix: str) -> str:
    try:
        text = data.decode("utf-8").strip()
        if suffix == "cls":
            return text if len(text) < 256 else ""
        found = parse_json(text)
        value = next((found[key] for key in _LABELS if key in found), "") if isinstance(found, dict) else ""
        return str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    except (UnicodeDecodeError, ValueError, RecursionError):
        return ""


def find_shards(root: str) -> list[Path]:
    """The shards of a folder (any depth), a pattern such as data-*.tar or data-{000..015}.tar, or one file."""
    found: list[Path] = []
    for pattern in expand(root):
        path = at_home(pattern)
        if path.is_dir():
            found += files_below(path, ".tar")
        elif path.exists():
            found.append(path)
        else:
            parts = path.parts
            start = next((i for i, part in enumerate(parts) if re.search(r"[*?\[]", part)), None)
            if start is None:
                raise SettingError("data.root", f"{pattern} does not exist.")
            try:
                found += sorted(Path(*parts[:start]).glob(str(Path(*parts[start:]))))
            except ValueError as error:
                raise SettingError("data.root", f"{pattern} is not a pattern ({error}).") from None
    return [real(file) for file in found if file.suffix.lower() == ".tar"]


def expand(pattern: str) -> list[str]:
    """`a-{08..10}.tar` as a-08.tar, a-09.tar and a-10.tar; anything else as it is."""
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if braces is None:
        return [pattern]
    rest = expand(pattern[braces.end() :])
    first, last = (int(word[:18]) for word in braces.groups())
    if (last - first) * len(rest) >= 1_000_000 or max(map(len, braces.groups())) > 18:
        raise SettingError("data.root", f"{pattern} names too many shards.")
    numbers = (f"{number:0{len(braces[1])}}" for number in range(first, last + 1))
    return [f"{pattern[: braces.start()]}{number}{name}" for number in numbers for name in rest]
