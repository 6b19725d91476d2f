"""Files and folders that are written whole or not at all, and read within bounds.

They are written under a name of their own beside the place where they go, flushed to the disk and then renamed: a kill,
a crash or a full disk at any moment leaves what was there before. The name cannot be guessed and must be new, so that
nobody's link or file is written through. What is only appended to is opened so that a link is refused.

What is read is a regular file of a limited size: a pipe, a device or a huge file that somebody put in the place of a
small one is an `OSError` at once.
"""

import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from momentum2.errors import SettingError

#: How the names of unfinished files and folders begin.
UNFINISHED = ".tmp-"
#: Bytes of the largest file of text or JSON that is read, unless the caller knows better.
LARGEST = 2**30


def at_home(path: str) -> Path:
    """A path in which `~` is the user's home; one of a user who is not there stays as it is, and will not be found."""
    return Path(os.path.expanduser(path))


def real(path: Path) -> Path:
    """The path without links; before Python 3.13 a link to itself is a `RuntimeError` of `resolve`."""
    return Path(os.path.realpath(path))


def read(path: Path, limit: int = LARGEST) -> bytes:
    """The content of a regular file of at most `limit` bytes; an `OSError` for anything else, at once."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(path))
        return file.read(size)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read from; an `OSError` for anything else, at once."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(descriptor, path)
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_text(path: Path, limit: int = LARGEST) -> str:
    """The same as text; bytes that are not UTF-8 are replaced."""
    return read(path, limit).decode(errors="replace")


def read_json(path: Path, limit: int = LARGEST) -> Any:
    """What a JSON file holds; a `ValueError` if it is not JSON."""
    return parse_json(read(path, limit))


def parse_json(data: bytes | str) -> Any:
    """What a JSON text holds; a `ValueError` if it is none, however deep it is or long its numbers are."""
    long = re.search(r"\d{19}", data, re.ASCII) if isinstance(data, str) else re.search(rb"\d{19}", data)
    try:
        return json.loads(data, parse_int=_short_int if long else None)
    except RecursionError:
        raise ValueError("the JSON is too deep") from None


def _short_int(text: str) -> int:
    """An integer of 64 bits: arithmetic with a longer one may be an error of its own, far from here."""
    if not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError("the JSON has a number of too many digits")
    return number


def folders_below(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, in order and however deep: before Python 3.12 that is a recursion, as `rglob` is.

    Links to folders are listed among the files and not followed.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        place = waiting.pop()
        folders, files = list[str](), list[str]()
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else files).append(entry.name)
        folders.sort()
        yield place, folders, sorted(files)
        waiting += [os.path.join(place, name) for name in reversed(folders)]


def files_below(folder: Path, *suffixes: str) -> Iterator[Path]:
    """The regular files below a folder that end so, in order."""
    for place, _, names in folders_below(folder):
        for name in names:
            path = Path(place, name)
            if path.suffix.lower() in suffixes and path.is_file():
                yield path


def append(path: Path) -> TextIO:
    """Open a file to append text to, which can be read too; an `OSError` if it is a link or not a regular file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    try:
        _check_regular(descriptor, path)
        return open(descriptor, "a+", encoding="utf-8", errors="surrogateescape")
    except OSError:
        os.close(descriptor)
        raise


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[None]:
    """Hold a lock that other processes on this machine respect; it is free again when its holder is gone.

    Without `wait`, a lock that somebody else holds is a `BlockingIOError`.
    """
    with append(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _check_regular(descriptor: int, path: Path) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file."""
    with whole_file(path) as file:
        file.write(data)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write the table that the setting `out` asks for; bytes in names that are not UTF-8 become escapes."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    with asked_for("out", path):
        write_whole(path, text.getvalue().encode("utf-8", "backslashreplace"))


@contextmanager
def asked_for(setting: str, path: Path) -> Iterator[None]:
    """Inside, `path` is written because a setting names it: if it cannot be, that is a mistake in the setting."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # /dev/stdout is a link
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        yield
    except OSError as error:
        raise SettingError(
            setting, f"{path} cannot be written ({error.strerror}). Choose another file."
        ) from None


def place_of(setting: str, path: str | os.PathLike[str], *suffixes: str) -> Path:
    """The file that a setting asks for, looked at before anything is computed for it."""
    path = Path(path)
    if path.suffix not in suffixes:
        raise SettingError(setting, f"must be a file that ends in {' or '.join(suffixes)}.")
    if not path.parent.is_dir():
        raise SettingError(
            setting, f"{path} is in a folder that does not exist. Create it, or choose another."
        )
    return path


def write_new(path: Path, data: bytes | str) -> None:
    """Write a file that must not be there, such as one in a `whole_folder`."""
    with path.open("xb") as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_parts(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a file that must not be there, part by part; its SHA-256. Other threads go on meanwhile."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in parts:
            digest.update(part)
            file.write(part)
    return digest.hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to, which takes the place of `path` at the end of the block; after an error there is none."""
    with whole_path(path) as temporary, temporary.open("xb") as file:
        yield file


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A place for others to write a file to, which takes the place of `path` at the end of the block."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise OSError(
                errno.EINVAL, "it is not a regular file", str(path)
            )  # nobody wants /dev/null replaced
    temporary = _unfinished(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def whole_folder(path: Path, name: str | None = None) -> Iterator[Path]:
    """A new folder to fill, which becomes `path` at the end of the block; after an error there is none.

    Args:
        path: It must not be there, unless as an empty folder.
        name: What it is called until then, for callers that hold a lock: what a killed process left there is removed.
    """
    temporary = _unfinished(path) if name is None else path.with_name(name)
    if name is not None:
        shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for entry in temporary.rglob("*"):
            sync(entry)
        sync(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


def remove_whole(path: Path) -> None:
    """Remove a folder so that a kill never leaves half of it under its name."""
    doomed = _unfinished(path)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_unfinished(folder: Path, older: float = 0.0) -> None:
    """Remove what killed processes left in a folder, if nothing was written to it for `older` seconds."""
    for leftover in folder.glob(f"{UNFINISHED}*"):
        if time.time() - leftover.lstat().st_mtime < older:
            continue
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def version(path: str | os.PathLike[str]) -> str:
    """Text that changes when a file may have changed: its size and its time."""
    found = os.stat(path)
    return f"{found.st_size}\0{found.st_mtime_ns}"


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
