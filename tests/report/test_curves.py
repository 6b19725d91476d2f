"""Curves: thinned out without losing what matters."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from momentum2.report.curves import BUCKETS, CURVES, alarms, series, thin
from momentum2.runs.handle import read_run


def test_thinning_keeps_ends_peaks_and_gaps():
    n = 100_000
    x, y = np.arange(n, dtype=float), np.random.default_rng(0).normal(size=n)
    y[12_345], y[54_321], y[77_777] = 100.0, -100.0, np.nan
    few_x, few_y = thin(x, y)
    assert len(few_x) <= 3 * BUCKETS
    assert (np.diff(few_x) > 0).all()
    assert {0, n - 1, 12_345, 54_321, 77_777} <= set(few_x.astype(int))
    np.testing.assert_array_equal(few_y, y[few_x.astype(int)])


def test_short_series_stay_whole():
    x = np.arange(2 * BUCKETS, dtype=float)
    assert len(thin(x, x)[0]) == 2 * BUCKETS


def test_axes(run: Path):
    files = replace(
        read_run(run),
        records=[
            {"step": 0, "knn_top1": 10.0},
            {"step": 10, "loss": 2.0, "step_time": 6.0},
            {"step": 20, "loss": float("nan"), "step_time": 6.0},
            {"step": 20, "knn_top1": 30.0},
        ],
        alarms=[(15, "Step 15: oh.")],
    )
    found = series(files)
    assert found["loss"] == {"step": [10, 20], "images": [80, 160], "minutes": [1, 2], "value": [2.0, None]}
    assert found["knn_top1"]["minutes"] == [0, 2]
    assert "lr" not in found
    assert alarms(files) == [{"step": 15, "images": 120, "minutes": 1.5, "text": "Step 15: oh."}]


def test_the_alphas_of_norms_are_drawn_beside_their_mean(run: Path):
    names = ("alpha", "alpha_min", "alpha_max")
    records = [{"step": 10, "step_time": 6.0, **{name: 0.1 * i for i, name in enumerate(names)}}]
    found = series(replace(read_run(run), records=records))
    assert [found[name]["value"] for name in names] == [[0.0], [0.1], [0.2]]
    panel = next(panel for panel in CURVES if panel.metric == "alpha")
    assert {panel.metric, *dict(panel.floors)} == set(names)
