"""Which of the labeled images may be used: a share of each class, or those on a list."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from momentum2.errors import SettingError
from momentum2.files import read
from momentum2.seeds import derive

Ints = NDArray[np.int64]


def stratified(labels: Ints, fraction: float, seed: int) -> Ints:
    """Sorted indices of `fraction` of each class, at least one; a larger fraction contains a smaller one."""
    if not 0 < fraction <= 1:
        raise SettingError("fraction", f"must be above 0 and at most 1, not {fraction:g}.")
    chosen = []
    for c in np.unique(labels):
        members = np.flatnonzero(labels == c)
        words = np.random.Philox(derive(seed, "subset", int(c))).random_raw(len(members))
        chosen.append(members[np.argsort(words, kind="stable")][: max(1, round(fraction * len(members)))])
    return np.sort(np.concatenate(chosen))


def listed(names: Sequence[str], path: Path) -> Ints:
    """Sorted indices of the images named in a text file, one per line: a file name, or the end of a path.

    SimCLR's lists of 1% and 10% of ImageNet, lines such as `n01440764_10074.JPEG`, are of this kind.
    """
    try:
        wanted = dict.fromkeys(line.strip() for line in read(path).decode().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("list", f"{path} cannot be read ({error}).") from None
    wanted.pop("", None)
    if not wanted:
        raise SettingError("list", f"{path} is empty. Write one file name per line.")
    depth = {line.count("/") + 1 for line in wanted}
    places: dict[str, list[int]] = {line: [] for line in wanted}
    for index, name in enumerate(names):
        parts = name.split("/")
        for d in depth:
            places.get("/".join(parts[-d:]), []).append(index)
    wrong = [line for line, found in places.items() if len(found) != 1]
    if wrong:
        what = "several" if places[wrong[0]] else "none"
        raise SettingError(
            "list",
            f"{path} has {len(wrong):,} of {len(wanted):,} lines that do not match exactly one training image. For "
            f"example, {wrong[0]} matches {what}.",
        )
    return np.unique([found[0] for found in places.values()])
