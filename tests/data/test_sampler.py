"""The batch of step k depends on (seed, k, batch size, length) alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from momentum2.data import sampler
from momentum2.data.sampler import batch_indices, seeded_subset, steps_per_epoch
from momentum2.errors import SettingError


@given(
    length=st.integers(1, 200),
    batch=st.integers(1, 200),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 9),
)
def test_an_epoch_repeats_nothing(length: int, batch: int, seed: int, epoch: int) -> None:
    if batch > length:
        with pytest.raises(SettingError, match=r"train.batch_size must be from 1"):
            steps_per_epoch(length, batch)
        return
    steps = steps_per_epoch(length, batch)
    assert steps == length // batch
    seen = np.concatenate([batch_indices(length, seed, epoch * steps + k, batch) for k in range(steps)])
    assert len(np.unique(seen)) == len(seen) == steps * batch
    assert 0 <= seen.min() <= seen.max() < length


def test_values_do_not_change_between_versions() -> None:
    """A resumed run must find its order again. Written out from raw Philox words (key: seed, epoch)."""
    words = np.random.Philox(
        key=np.array([7, 2], np.uint64), counter=np.array([0, 0, 0, 1], np.uint64)
    ).random_raw(10)
    order = sorted(range(10), key=lambda i: words[i])
    assert batch_indices(10, 7, 2 * 3 + 1, 3).tolist() == order[3:6]
    assert batch_indices(10, 7, 7, 3).tolist() == [8, 0, 6]


def test_epochs_and_seeds_differ() -> None:
    first = batch_indices(1000, 0, 0, 1000)
    assert (first != batch_indices(1000, 0, 1, 1000)).any()
    assert (first != batch_indices(1000, 1, 0, 1000)).any()
    assert (first == batch_indices(1000, 0, 0, 1000)).all()


def test_order_is_uniform() -> None:
    """Over many seeds every image is first equally often: chi-squared with 9 degrees of freedom."""
    firsts = np.bincount([batch_indices(10, seed, 0, 1)[0] for seed in range(5000)], minlength=10)
    assert ((firsts - 500) ** 2 / 500).sum() < 27.9  # p = 0.001


def test_a_late_step_costs_no_more_than_an_early_one() -> None:
    assert len(batch_indices(50, 0, 10**15, 50)) == 50


def test_subset_is_nested_and_apart_from_the_epochs() -> None:
    small, large = seeded_subset(100, 0, 10), seeded_subset(100, 0, 50)
    assert set(small) < set(large)
    assert (np.diff(large) > 0).all()
    assert set(large) != set(batch_indices(100, 0, 0, 50))


# -- the order of very many images


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 1000, 65_536, 100_003])
def test_a_feistel_order_has_every_image_once(length: int) -> None:
    keys = np.random.Philox(key=5).random_raw(6)
    found = sampler.feistel(np.arange(length, dtype=np.uint64), length, keys)
    np.testing.assert_array_equal(np.sort(found), np.arange(length))
    if length >= 1000:  # about the share of places that a random shuffle leaves as they are: 1/n
        assert (found == np.arange(length)).sum() < 10
        assert abs(np.corrcoef(found.astype(float), np.arange(length))[0, 1]) < 0.1


def test_a_feistel_order_is_that_of_plain_arithmetic() -> None:
    """An oracle in Python's own integers, one index at a time."""

    def mix(x: int) -> int:
        mask = 2**64 - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    def place(i: int, n: int, keys: list[int]) -> int:
        half = max(1, -(-(n - 1).bit_length() // 2))
        while True:
            left, right = i >> half, i % 2**half
            for key in keys:
                left, right = right, left ^ mix((right + key) % 2**64) % 2**half
            i = left * 2**half + right
            if i < n:
                return i

    for n in (37, 10**8, 10**12 + 7):
        keys = np.random.Philox(key=np.array([3, 9], np.uint64), counter=np.array([0, 0, 0, 2], np.uint64))
        words = keys.random_raw(6)
        places = np.random.default_rng(0).integers(0, n, 200).astype(np.uint64)
        expected = [place(int(i), n, [int(word) for word in words]) for i in places]
        np.testing.assert_array_equal(sampler.feistel(places, n, words), expected)


def test_batches_of_a_feistel_order() -> None:
    length, batch = 1003, 50
    epochs = [
        np.concatenate(
            [batch_indices(length, 7, step, batch, "feistel") for step in range(20 * e, 20 * e + 20)]
        )
        for e in range(3)
    ]
    for epoch in epochs:
        assert len(np.unique(epoch)) == 1000
        assert epoch.max() < length
    assert not np.array_equal(epochs[0], epochs[1])
    other = batch_indices(length, 8, 0, batch, "feistel")
    assert not np.array_equal(other, epochs[0][:50])
    # Every bit is a promise: a resumed run sees these images.
    assert batch_indices(10**8, 0, 5, 4, "feistel").tolist() == [8156231, 48688333, 61111096, 59344041]


def test_which_order_is_chosen() -> None:
    assert sampler.chosen_order("auto", 10_000_000) == "exact"
    assert sampler.chosen_order("auto", 10_000_001) == "feistel"
    assert sampler.chosen_order("exact", 10**9) == "exact"
    assert (
        sampler.chosen_order("auto", 10**9, {"images": 10**9}) == "exact"
    )  # a run from before there was a choice
    assert sampler.chosen_order("auto", 5, {"order": "feistel"}) == "feistel"
