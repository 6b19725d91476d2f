"""Which images make up a batch when some are shown more often than others (LVIS's repeat factors)."""

from collections import Counter
from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from momentum2.data.sampler import batch_indices, steps_per_epoch
from momentum2.seeds import uniform


def repeat_factors(classes: Sequence[frozenset[int]], threshold: float) -> NDArray[np.float64]:
    """How often an epoch shows each image: max over its classes c of max(1, √(threshold / share of images with c))."""
    images = Counter(label for shown in classes for label in shown)
    repeat = {label: max(1.0, sqrt(threshold * len(classes) / n)) for label, n in images.items()}
    return np.array([max((repeat[label] for label in shown), default=1.0) for shown in classes])


class Sampler:
    """Indices of the batch of each step, a pure function of (seed, step).

    An epoch is ⌊Σ factors⌋ draws: evenly spaced points along the factors laid end to end, moved by a random offset
    each epoch. An image with factor r comes up ⌊r⌋ or ⌈r⌉ times, on average r; with all factors 1, once.
    """

    def __init__(self, factors: NDArray[np.float64], seed: int, batch_size: int) -> None:
        self.ends = np.cumsum(factors)
        self.length = int(self.ends[-1] + 1e-9)
        self.seed, self.batch_size = seed, batch_size
        self.steps_per_epoch = steps_per_epoch(self.length, batch_size)

    def batch(self, step: int) -> NDArray[np.int64]:
        """Images of the global batch of `step`, int64 (batch_size,)."""
        offset = uniform(self.seed, "repeat", step // self.steps_per_epoch)
        points = batch_indices(self.length, self.seed, step, self.batch_size) + offset
        return np.minimum(np.searchsorted(self.ends, points, side="right"), len(self.ends) - 1)
