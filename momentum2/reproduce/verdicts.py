"""What seeds say about a claim: the effect, how well it is known, and one word.

Two rows are compared seed by seed. With differences d of n seeds, the effect is their mean, its 95% interval
mean ± t·s/√n by Student's t, and the smallest effect that these runs would have found four times in five
(t + t₈₀)·s/√n. Two or three differences say next to nothing about their own spread s (with two, t is 12.7), so there
s is that of all rows of the table together, as far as these differ alike from seed to seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

import numpy as np

Word = Literal["shown", "contradicted", "bounded", "one seed"]

#: Student's t at 97.5 % and at 80 %, for 1, 2, ... degrees of freedom; the last stands for more.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
_T80 = (
    1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883, 0.879, 0.876, 0.873, 0.870, 0.868, 0.866, 0.865,
    0.863, 0.862, 0.861, 0.860,
)  # fmt: skip

#: With fewer seeds, a difference has the spread of its whole table.
OWN_SPREAD = 4


@dataclass(frozen=True)
class Claim:
    """What the paper says about two rows of a table.

    Args:
        words: The claim.
        better: The key of the row that is claimed to be better, or as good.
        other: The key of the row it is compared with.
        margin: None for "better". For "as good as": points, or percent of the time, that it may be behind.
        cost: Whether it is about the time of a step instead of the accuracy.
    """

    words: str
    better: str
    other: str
    margin: float | None = None
    cost: bool = False


@dataclass(frozen=True)
class Verdict:
    """A claim as seeds have it, in points.

    Args:
        seeds: Number of pairs: seeds, or turns of a clock.
        effect: How far the better row is ahead, in the mean.
        interval: Half of the 95% interval of the effect; None with one seed.
        visible: The smallest effect that would have been found four times in five; None with one seed.
        word: shown: the whole interval agrees with the claim. contradicted: none of it does. bounded: undecided, the
            effect lies in the interval. one seed: there is no interval.
    """

    seeds: int
    effect: float
    interval: float | None
    visible: float | None
    word: Word


@dataclass(frozen=True)
class Spread:
    """How much the difference of two rows varies from seed to seed.

    Args:
        deviation: Standard deviation of one difference.
        freedom: Degrees of freedom of its estimate.
    """

    deviation: float
    freedom: int


def pooled(rows: Sequence[Mapping[int, float]]) -> Spread | None:
    """The spread that rows with these values by seed have in common; None if they leave nothing to estimate it from.

    It is what a fit of value = row + seed leaves over: a seed that is good for all rows does not count, nor does
    what the rows differ in.
    """
    seeds = sorted({seed for row in rows for seed in row})
    cells = [(i, seeds.index(seed), value) for i, row in enumerate(rows) for seed, value in row.items()]
    design = np.zeros((len(cells), len(rows) + len(seeds)))
    for line, (i, j, _) in enumerate(cells):
        design[line, i] = design[line, len(rows) + j] = 1.0
    values = np.array([value for *_, value in cells])
    freedom = len(cells) - int(np.linalg.matrix_rank(design)) if cells else 0
    if freedom == 0:
        return None
    left = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    return Spread(math.sqrt(2 * float(left @ left) / freedom), freedom)


def judge(differences: Sequence[float], margin: float | None = None, table: Spread | None = None) -> Verdict:
    """The verdict on "better by more than 0", or on "behind by at most `margin`".

    Args:
        differences: One a seed.
        margin: As a claim has it.
        table: What takes the place of their own spread where they are few.
    """
    n, effect = len(differences), mean(differences)
    if n < 2:
        return Verdict(n, effect, None, None, "one seed")
    spread = Spread(stdev(differences), n - 1)
    if table is not None and n < OWN_SPREAD:
        spread = table
    place = min(spread.freedom, len(_T975)) - 1
    error = spread.deviation / math.sqrt(n)
    half = _T975[place] * error
    bar = -(margin or 0.0)
    word: Word = "shown" if effect - half > bar else "contradicted" if effect + half < bar else "bounded"
    return Verdict(n, effect, half, half + _T80[place] * error, word)
