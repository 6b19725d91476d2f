"""Data in a bucket or behind a web address: whole files are fetched once for each machine, and then read from its disk.

Credentials are fsspec's own business (environment variables, files in the home folder). A URL that carries a secret is
refused, because URLs end up in configs, plans, pages and cards.
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from momentum2.data.cache import cache_folder
from momentum2.data.shards import expand
from momentum2.errors import SettingError, UserError, reason
from momentum2.files import locked, remove_unfinished, whole_path
from momentum2.terminal import progress

T = TypeVar("T")

#: What may be before ://. Others could run programs, or mean something else on another machine.
PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "hf")
_SUFFIXES = (".tar", ".zip", ".parquet")
#: What file systems call the version of a file.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Last-Modified", "LastModified", "mtime", "last_modified"),
)
_AT_ONCE = 8  # files that are fetched side by side
_TRIES = 4
_SPARE = 1.02  # of the disk's free space
_HOUR = 3600.0  # seconds


def is_remote(root: str | None) -> bool:
    return root is not None and (root.startswith("pipe:") or "://" in root)


def check_url(root: str | None, setting: str = "data.root") -> None:
    """Refuse a URL that carries a secret or runs a program. The sentence does not repeat it."""
    if root is None or not is_remote(root):
        return
    if root.startswith("pipe:"):
        raise SettingError(
            setting, "is a pipe: URL, which would run a program. Pass files or a URL of files."
        )
    if "::" in root:
        raise SettingError(setting, "is a chain of URLs. Pass the URL of the files themselves.")
    scheme, rest = root.split(":", 1)
    if scheme.lower() not in PROTOCOLS or not rest.startswith("//"):
        raise SettingError(
            setting, f"begins with {scheme}:, but takes a path or {', '.join(PROTOCOLS)} and ://."
        )
    address = urlsplit(root)
    if "@" in address.netloc:
        raise SettingError(
            setting,
            "has a user or password in its URL, which would be written into the run. Leave them to the environment.",
        )
    if "?" in root or "#" in root:
        raise SettingError(
            setting,
            "has a query behind its URL, such as a signature, which would be written into the run. Use the plain URL "
            "and credentials from the environment.",
        )


def fetch(root: str, cache_dir: str | None) -> list[Path]:
    """Local copies of the files that a URL (with * or {000..015}) names, in order, fetched where they are missing.

    A file is found again by its URL, size and whatever the server says of its version; a changed one is fetched anew.
    """
    check_url(root)
    system, urls = _listed(root)
    base = cache_folder(cache_dir) / "remote"
    try:
        base.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            "data.cache_dir", f"{base} cannot be written ({error}). Choose another folder."
        ) from error
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = list(threads.map(partial(_described, system), urls))
        paths = [
            base / f"{identity}{Path(url).suffix}" for url, (_, identity) in zip(urls, found, strict=True)
        ]
        folder = hashlib.sha256("\n".join(urls).encode()).hexdigest()[:16]
        # The other processes of this machine wait, and find everything there.
        with locked(base / f"{folder}.lock"):
            missing = [
                (url, size, path)
                for url, (size, _), path in zip(urls, found, paths, strict=True)
                if not path.is_file() or path.stat().st_size != size
            ]
            remove_unfinished(base, _HOUR)  # of processes that were killed
            _check_space(base, sum(size for _, size, _ in missing))
            with progress("Fetching files", len(missing), "files") as advance:
                for _ in threads.map(lambda one: _fetched(system, *one), missing):
                    advance(1)
            return _linked(base / folder, urls, paths)


def _listed(root: str) -> tuple[Any, list[str]]:
    """The file system, and the URLs of the files."""
    try:
        import fsspec
    except ImportError:
        raise UserError("Data behind a URL needs an extra. Run pip install 'momentum2[remote]'.") from None
    scheme = root.split("://", 1)[0]
    try:
        system = fsspec.filesystem(scheme.lower())
    except (ImportError, ValueError) as error:
        raise UserError(f"fsspec cannot read {scheme}:// yet ({error}).") from None
    urls = expand(root)
    if "*" in root:
        urls = _attempt(
            root, lambda: [system.unstrip_protocol(path) for url in urls for path in sorted(system.glob(url))]
        )
    elif not root.endswith(_SUFFIXES):
        folder = root.rstrip("/")
        names = _attempt(root, lambda: sorted(system.find(folder)))
        urls = [system.unstrip_protocol(name) for name in names if name.endswith(_SUFFIXES)]
    if not urls:
        raise SettingError(
            "data.root",
            f"{root} has no files ending in {', '.join(_SUFFIXES)}. Single images are not fetched: pack them "
            "into shards.",
        )
    return system, urls


def _described(system: Any, url: str) -> tuple[int, str]:
    """Size, and a name for this version of the file."""
    info = _attempt(url, lambda: system.info(url))
    size = info.get("size")
    if not isinstance(size, int):
        raise SettingError(
            "data.root", f"{url} does not say how large it is, so it cannot be fetched safely."
        )
    known = [f"{name}={info[name]}" for name in _VERSIONS if info.get(name)]
    return size, hashlib.sha256("\n".join([url, str(size), *known]).encode()).hexdigest()[:24]


def _check_space(base: Path, needed: int) -> None:
    free = shutil.disk_usage(base).free
    if needed * _SPARE > free:
        raise SettingError(
            "data.cache_dir",
            f"{base} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB must be downloaded. Choose "
            "another folder.",
        )


def _fetched(system: Any, url: str, size: int, path: Path) -> None:
    def get() -> None:
        with whole_path(path) as temporary:
            system.get_file(url, str(temporary))
            if temporary.stat().st_size != size:
                raise OSError(f"{temporary.stat().st_size:,} of {size:,} bytes came")

    _attempt(url, get)


def _attempt(url: str, work: Callable[[], T]) -> T:
    """Do it, a few times if the network fails; a `UserError` if it always does."""
    for turn in range(_TRIES):
        try:
            return work()
        except FileNotFoundError:
            raise SettingError("data.root", f"{url} does not exist.") from None
        except PermissionError as error:
            raise UserError(
                f"{url} may not be read ({_short(error)}). Check the credentials in the environment."
            ) from None
        except Exception as error:  # every file system has its own
            if turn == _TRIES - 1:
                raise UserError(
                    f"{url} could not be fetched ({_short(error)}). Run the same command again."
                ) from None
            time.sleep(0.2 * 4**turn)
    raise AssertionError


def _short(error: Exception) -> str:
    """One line, without addresses that may have been signed on the way."""
    return re.sub(r"\w+://\S+", "URL", reason(error))


def _linked(folder: Path, urls: Sequence[str], paths: Sequence[Path]) -> list[Path]:
    """The files under their own names, as links: names say splits, and are those of a copy on the disk."""
    parts = [PurePosixPath(url.split("://", 1)[1]) for url in urls]
    base = os.path.commonpath([part.parent for part in parts])
    links = []
    for part, path in zip(parts, paths, strict=True):
        link = folder / part.relative_to(base)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink() or link.readlink() != path:
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        links.append(link)
    return links
