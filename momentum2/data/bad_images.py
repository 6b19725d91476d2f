"""bad_images.txt: what could not be read, and why. Every process of a run adds what it finds."""

import fcntl
import logging
from collections.abc import Mapping
from pathlib import Path

from momentum2.data.dataset import Dataset
from momentum2.files import append


def report_bad(dataset: Dataset, found: Mapping[int, str], path: Path | None) -> None:
    """Remember bad images (index: reason) and list them in `path`; too many of them are a `UserError`."""
    if not found:
        return
    dataset.bad.update(found)
    if path is None:
        dataset.check_bad()
        return
    named = {dataset.names[i]: reason for i, reason in sorted(found.items())}
    listed = _list(named, path)
    dataset.check_bad(listed, str(path))
    if listed == len(named):  # the first ones
        name, reason = next(iter(named.items()))
        logging.getLogger("momentum2").warning(
            "Cannot read %s (%s). Unreadable images are listed in %s.", name, reason, path
        )


def _list(found: Mapping[str, str], path: Path) -> int:
    """Add lines `name<tab>reason` for the names that have none yet; returns the number of lines."""
    path.parent.mkdir(parents=True, exist_ok=True)  # on a machine that does not share the run directory
    with append(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = {line.split("\t", 1)[0] for line in file}
        lines = {_one_line(name): _one_line(reason) for name, reason in found.items()}
        file.writelines(f"{name}\t{reason}\n" for name, reason in lines.items() if name not in known)
    return len(known | lines.keys())


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
