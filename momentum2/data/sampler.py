"""Which images make up the batch of step k: a pure function of (seed, k, batch size, number of images)."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from momentum2.config import ExactOrder, Order
from momentum2.errors import SettingError

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_LARGEST = 10_000_000  # images that are shuffled at once, in 2 seconds and 160 MB
_ROUNDS = 6

_SUBSET_STREAM = 2**64 - 1  # epochs count from 0 and never get here


def steps_per_epoch(length: int, batch_size: int) -> int:
    """Whole batches in one pass; the images left over are seen in other epochs."""
    if not 1 <= batch_size <= length:
        raise SettingError(
            "train.batch_size", f"must be from 1 to {length:,}, the number of images, not {batch_size:,}."
        )
    return length // batch_size


def chosen_order(order: Order, length: int, before: Mapping[str, Any] | None = None) -> ExactOrder:
    """What `order` stands for with so many images, or stood for in the run whose checkpoint says `before`.

    A run that does not say it began before there was a choice.
    """
    if before:
        return "feistel" if before.get("order") == "feistel" else "exact"
    if order != "auto":
        return order
    return "exact" if length <= _LARGEST else "feistel"


def batch_indices(length: int, seed: int, step: int, batch_size: int, order: ExactOrder = "exact") -> Ints:
    """Indices of the global batch of `step`, int64 (batch_size,): no image comes twice in an epoch.

    `exact` shuffles all images of an epoch at once; `feistel` computes the place of each, and needs no memory.
    """
    epoch, place = divmod(step, steps_per_epoch(length, batch_size))
    if order == "feistel":
        places = np.arange(place * batch_size, (place + 1) * batch_size, dtype=np.uint64)
        return feistel(places, length, _words(seed, epoch, _ROUNDS, counter=2)).astype(np.int64)
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


def feistel(places: Words, length: int, keys: Words) -> Words:
    """Where a keyed shuffle of 0 to `length - 1` has put each of `places`, uint64 (n,).

    A Feistel network is a bijection of the numbers with an even number of bits: each round exchanges the halves and
    changes one by a hash of the other. Whoever lands outside goes on until he is inside, at most 4 times on average.
    """
    half = np.uint64(max(1, ((length - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = places.copy()
    outside = np.arange(len(out))
    while len(outside):
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        out[outside] = left << half | right
        outside = outside[out[outside] >= length]
    return out


def _mixed(x: Words) -> Words:
    """A 64-bit hash whose every bit depends on all bits of x (the finalizer of SplitMix64)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, stream: int) -> Ints:
    """0 to `length - 1`, shuffled by raw Philox words, whose values NumPy promises forever."""
    order = np.argsort(_words(seed, stream, length, counter=1), kind="stable")
    order.flags.writeable = False
    return order


def _words(seed: int, stream: int, count: int, counter: int) -> Words:
    """Raw Philox words; counters from 1 keep them apart from the words that the augmentation draws."""
    key = np.array([seed % 2**64, stream], np.uint64)
    generator = np.random.Philox(key=key, counter=np.array([0, 0, 0, counter], np.uint64))
    return np.asarray(generator.random_raw(count), np.uint64)
