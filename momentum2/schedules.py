"""Schedules: pure functions of k, the number of optimizer steps done, and K, their total.

Nothing here remembers anything, so nothing restarts when a run resumes.
"""

import math
from dataclasses import dataclass
from typing import Literal


def cosine(base: float, k: int, K: int) -> float:
    """The paper's schedule of m and α: `base` at k = 0, falling to 0 at k = K."""
    return base * (math.cos(math.pi * k / K) + 1) / 2


def warmup_cosine(base: float, k: int, K: int, warmup: int = 0, start: float = 0.001) -> float:
    """Learning rate: linear from `start·base` over `warmup` steps, then cosine from `base` to 0 at K."""
    if k < warmup:
        return base * (start + (1 - start) * k / warmup)
    return cosine(base, k - warmup, max(K - warmup, 1))


def warmup_step_decay(
    base: float,
    k: int,
    K: int,
    milestones: tuple[float, ...],
    warmup: int = 0,
    start: float = 0.001,
) -> float:
    """Learning rate in steps: the same warm-up, then `base`, divided by ten at each milestone (a share of K)."""
    passed = sum(k >= round(share * K) for share in milestones)
    return base * min(start + (1 - start) * k / warmup if warmup else 1.0, 1.0) * 0.1**passed


def cosine_between(start: float, end: float, k: int, K: int) -> float:
    """`start` at k = 0, moving to `end` at k = K."""
    return end + cosine(start - end, k, K)


def scaled_lr(lr_per_256: float, batch_size: int) -> float:
    """The linear scaling rule: lr is given for 256 images and grows with the batch."""
    return lr_per_256 * batch_size / 256


def scaled_weight_momentum(m_base: float, batch_size: int, reference_batch: int | None) -> float:
    """The other half of the paper's joint rule: batch × n means lr × n *and* m_base × n (at most 1).

    The rule is Momentum² Teacher's alone; without a reference batch, m_base is used as given.
    """
    if reference_batch is None:
        return m_base
    return min(m_base * batch_size / reference_batch, 1.0)


@dataclass(frozen=True)
class Schedule:
    """Every scheduled value of a run of K steps, each a function of the step k alone.

    `alpha_fixed` is a number, "auto" if every norm chooses its own, or None for the cosine from `alpha_base` to 0.
    """

    K: int
    lr_base: float
    warmup: int = 0
    warmup_start: float = 0.001
    m_base: float = 0.0
    m_constant: bool = False
    alpha_base: float = 1.0
    alpha_fixed: float | Literal["auto"] | None = None
    milestones: tuple[float, ...] = ()

    def lr(self, k: int) -> float:
        """Learning rate of the step after k are done: a cosine, or in steps where there are milestones."""
        if self.milestones:
            return warmup_step_decay(self.lr_base, k, self.K, self.milestones, self.warmup, self.warmup_start)
        return warmup_cosine(self.lr_base, k, self.K, self.warmup, self.warmup_start)

    def m(self, k: int) -> float:
        """Share of the student that enters the teacher's weights."""
        return self.m_base if self.m_constant else cosine(self.m_base, k, self.K)

    def alpha(self, k: int) -> float | Literal["auto"]:
        """Weight of the current batch in the teacher's statistics, or "auto"."""
        return cosine(self.alpha_base, k, self.K) if self.alpha_fixed is None else self.alpha_fixed
