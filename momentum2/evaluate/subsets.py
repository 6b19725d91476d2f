"""Which of the labelled images may be used: a share of each class, or those on a list."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from momentum2.errors import UserError
from momentum2.seeds import derive

Ints = NDArray[np.int64]


def stratified(labels: Ints, fraction: float, seed: int) -> Ints:
    """Sorted indices of `fraction` of each class, at least one; a larger fraction contains a smaller one."""
    if not 0 < fraction <= 1:
        raise UserError(f"The fraction of the labels must be above 0 and at most 1, not {fraction:g}.")
    chosen = []
    for c in np.unique(labels):
        members = np.flatnonzero(labels == c)
        words = np.random.Philox(derive(seed, "subset", int(c))).random_raw(len(members))
        chosen.append(members[np.argsort(words, kind="stable")][: max(1, round(fraction * len(members)))])
    return np.sort(np.concatenate(chosen))


def listed(names: Sequence[str], path: Path) -> Ints:
    """Sorted indices of the images named in a text file, one a line: a file name, or the end of a path.

    SimCLR's lists of 1 % and 10 % of ImageNet, lines such as `n01440764_10074.JPEG`, are of this kind.
    """
    try:
        wanted = dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The list {path} cannot be read ({error}).") from None
    wanted.pop("", None)
    if not wanted:
        raise UserError(f"The list {path} is empty: write one file name a line.")
    depth = {line.count("/") + 1 for line in wanted}
    places: dict[str, list[int]] = {line: [] for line in wanted}
    for index, name in enumerate(names):
        parts = name.split("/")
        for d in depth:
            places.get("/".join(parts[-d:]), []).append(index)
    wrong = [line for line, found in places.items() if len(found) != 1]
    if wrong:
        what = "the name of several" if places[wrong[0]] else "not among the"
        raise UserError(
            f"{len(wrong):,} of {len(wanted):,} lines of {path} are wrong:"
            f" {wrong[0]} is {what} training images."
        )
    return np.unique([found[0] for found in places.values()])
