"""Files and folders that are written whole or not at all.

They are written under a name of their own beside the place where they go, flushed to the disk and then renamed: a kill,
a crash or a full disk at any moment leaves what was there before. The name cannot be guessed and must be new, so that
nobody's link or file is written through.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

#: How the names of unfinished files and folders begin.
UNFINISHED = ".tmp-"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file."""
    with whole_file(path) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to, which takes the place of `path` at the end of the block; after an error there is none."""
    temporary = _unfinished(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A place for others to write a file to, which takes the place of `path` at the end of the block."""
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


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
