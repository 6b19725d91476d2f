"""Schedules: pure functions of k, the number of optimizer steps done, and K, their total.

Nothing here remembers anything, so nothing restarts when a run resumes.
"""

import math


def cosine(base: float, k: int, K: int) -> float:
    """The paper's schedule of m and α: `base` at k = 0, falling to 0 at k = K."""
    return base * (math.cos(math.pi * k / K) + 1) / 2


def warmup_cosine(base: float, k: int, K: int, warmup: int = 0, start: float = 0.001) -> float:
    """Learning rate: linear from `start·base` over `warmup` steps, then cosine from `base` to 0 at K."""
    if k < warmup:
        return base * (start + (1 - start) * k / warmup)
    return cosine(base, k - warmup, max(K - warmup, 1))


def scaled_lr(lr_per_256: float, batch_size: int) -> float:
    """The linear scaling rule: lr is given for 256 images and grows with the batch."""
    return lr_per_256 * batch_size / 256


def scaled_weight_momentum(m_base: float, batch_size: int, reference_batch: int) -> float:
    """The other half of the paper's joint rule: batch × n means lr × n *and* m_base × n (at most 1)."""
    return min(m_base * batch_size / reference_batch, 1.0)
