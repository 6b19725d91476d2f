"""Verdicts against SciPy's t-test and against simulated seeds."""

import math

import numpy as np
import pytest
from scipy import stats

from momentum2.reproduce.verdicts import _T80, _T975, judge


def test_quantiles_are_students():
    for freedom, (high, power) in enumerate(zip(_T975, _T80, strict=True), 1):
        assert high == pytest.approx(stats.t.ppf(0.975, freedom), abs=6e-4)
        assert power == pytest.approx(stats.t.ppf(0.8, freedom), abs=6e-4)


@pytest.mark.parametrize("n", [2, 3, 6, 12])
def test_the_interval_is_that_of_a_paired_t_test(n: int):
    rng = np.random.default_rng(n)
    a, b = rng.normal(50, 2, n), rng.normal(48, 2, n)
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    found = judge(list(a - b))
    assert found.interval is not None
    assert found.effect - found.interval == pytest.approx(expected.low, rel=1e-3)
    assert found.effect + found.interval == pytest.approx(expected.high, rel=1e-3)


@pytest.mark.parametrize(
    ("differences", "margin", "word"),
    [
        ([2.0, 2.5, 3.0], None, "shown"),
        ([-2.0, -2.5, -3.0], None, "contradicted"),
        ([2.0, -2.5, 3.0], None, "bounded"),
        ([0.1, -0.1, 0.0], 1.0, "shown"),  # as good as
        ([0.1, -0.1, 0.0], None, "bounded"),
        ([-2.0, -2.1, -2.2], 1.0, "contradicted"),
        ([-0.9, -1.1, -1.0], 1.0, "bounded"),
        ([5.0], None, "one seed"),  # which decides nothing
    ],
)
def test_words(differences: list[float], margin: float | None, word: str):
    assert judge(differences, margin).word == word


def test_the_smallest_visible_effect_is_found_four_times_in_five():
    rng, n, sigma = np.random.default_rng(0), 6, 1.5
    error = sigma / math.sqrt(n)
    effect = (stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)) * error
    words = [judge(list(rng.normal(effect, sigma, n))).word for _ in range(2000)]
    assert words.count("shown") / 2000 == pytest.approx(0.8, abs=0.04)
    none = [judge(list(rng.normal(0, sigma, n))).word for _ in range(2000)]
    assert none.count("bounded") / 2000 == pytest.approx(0.95, abs=0.015)
