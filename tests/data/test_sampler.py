"""The batch of step k depends on (seed, k, batch size, length) alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
