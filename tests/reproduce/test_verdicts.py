"""Verdicts against SciPy's t-test and against simulated seeds."""

import math

import numpy as np
import pytest
from scipy import stats

from momentum2.reproduce.verdicts import _T80, _T975, OWN_SPREAD, judge, pooled


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


def by_seed(values: np.ndarray) -> list[dict[int, float]]:
    return [{seed: float(value) for seed, value in enumerate(row)} for row in values]


def test_the_common_spread_is_the_residual_of_a_two_way_analysis():
    y = np.random.default_rng(3).normal(40, 2, (7, 3))
    left = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()  # balanced: the closed form
    found = pooled(by_seed(y))
    assert found is not None
    assert found.freedom == 6 * 2
    assert found.deviation == pytest.approx(math.sqrt(2 * (left**2).sum() / 12))
    shifted = pooled(by_seed(y + np.arange(7)[:, None] + 10 * np.arange(3)))  # rows and seeds do not count
    assert shifted is not None
    assert shifted.deviation == pytest.approx(found.deviation)


def test_the_common_spread_of_two_rows_is_that_of_their_differences():
    y = np.random.default_rng(4).normal(40, 2, (2, 5))
    found = pooled([*by_seed(y), {9: 30.0}])  # a row that shares no seed says nothing
    assert found is not None
    assert found.freedom == 4
    assert found.deviation == pytest.approx(np.std(y[0] - y[1], ddof=1))


def test_one_seed_has_no_common_spread():
    assert pooled([{0: 1.0}, {0: 2.0}, {1: 3.0}]) is None
    assert pooled([]) is None


def test_few_seeds_have_the_spread_of_their_table_and_many_their_own():
    table = pooled(by_seed(np.random.default_rng(5).normal(40, 2, (7, 2))))
    assert table is not None
    few = judge([1.0, 2.0], None, table)
    assert few.interval == pytest.approx(stats.t.ppf(0.975, 6) * table.deviation / math.sqrt(2), rel=1e-3)
    many = [1.0, 2.0, 0.5, 1.5]
    assert len(many) == OWN_SPREAD
    assert judge(many, None, table) == judge(many)


def test_the_common_spread_errs_once_in_twenty():
    rng, words = np.random.default_rng(6), []
    for _ in range(2000):
        y = rng.normal(0, 1.5, (7, 2)) + rng.normal(0, 3, 2)  # no row is better; seeds differ
        words.append(judge(list(y[0] - y[1]), None, pooled(by_seed(y))).word)
    assert words.count("bounded") / 2000 == pytest.approx(0.95, abs=0.015)
