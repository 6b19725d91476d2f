"""What seeds say about a claim: the effect, how well it is known, and one word.

Two rows are compared seed by seed. With differences d of n seeds, the effect is their mean, its 95% interval
mean ± t·s/√n by Student's t, and the smallest effect that these runs would have found four times in five
(t + t₈₀)·s/√n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Literal

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


def judge(differences: Sequence[float], margin: float | None = None) -> Verdict:
    """The verdict on "better by more than 0", or on "behind by at most `margin`", of one difference a seed."""
    n, effect = len(differences), mean(differences)
    if n < 2:
        return Verdict(n, effect, None, None, "one seed")
    place = min(n - 2, len(_T975) - 1)
    error = stdev(differences) / math.sqrt(n)
    half = _T975[place] * error
    bar = -(margin or 0.0)
    word: Word = "shown" if effect - half > bar else "contradicted" if effect + half < bar else "bounded"
    return Verdict(n, effect, half, half + _T80[place] * error, word)
