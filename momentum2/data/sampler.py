"""Which images make up the batch of step k: a pure function of (seed, k, batch size, number of images)."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from momentum2.errors import SettingError

Ints = NDArray[np.int64]

_SUBSET_STREAM = 2**64 - 1  # epochs count from 0 and never get here


def steps_per_epoch(length: int, batch_size: int) -> int:
    """Whole batches in one pass; the images left over are seen in other epochs."""
    if not 1 <= batch_size <= length:
        raise SettingError(
            "train.batch_size", f"must be from 1 to {length:,}, the number of images, not {batch_size:,}."
        )
    return length // batch_size


def batch_indices(length: int, seed: int, step: int, batch_size: int) -> Ints:
    """Indices of the global batch of `step`, int64 (batch_size,): no image comes twice in an epoch."""
    epoch, place = divmod(step, steps_per_epoch(length, batch_size))
    return _permutation(length, seed, epoch)[place * batch_size : (place + 1) * batch_size]


def own_places(batch_size: int, accumulate: int, rank: int, world: int) -> Ints:
    """Places in the global batch of a process's samples, micro-batch after micro-batch, int64.

    Micro-batch i of A is rows [i·B/A, (i+1)·B/A) of the global batch, and each process has an equal part of it:
    what is computed of a micro-batch does not depend on the number of processes.
    """
    return np.arange(batch_size).reshape(accumulate, world, -1)[:, rank].reshape(-1)


def seeded_subset(length: int, seed: int, count: int) -> Ints:
    """The first `count` of a seeded order, sorted; a larger count contains a smaller one."""
    return np.sort(_permutation(length, seed, _SUBSET_STREAM)[:count])


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, stream: int) -> Ints:
    """0 to `length - 1`, shuffled by raw Philox words, whose values NumPy promises forever."""
    key = np.array([seed % 2**64, stream], np.uint64)
    counter = np.array([0, 0, 0, 1], np.uint64)  # apart from the words that the augmentation draws
    order = np.argsort(np.random.Philox(key=key, counter=counter).random_raw(length), kind="stable")
    order.flags.writeable = False
    return order
