from pathlib import Path
from typing import Any

import pytest

from momentum2.config import Config
from momentum2.report.summary import results_table, verdict
from momentum2.runs.handle import Snapshot


def run(*records: dict[str, Any], results: dict[str, Any] | None = None) -> Snapshot:
    return Snapshot(Path("run"), "run", Config(), [*records], [], results or {}, "", 0, True)


def knn(step: int, top1: float, interval: float = 1.0, images: int = 500) -> dict[str, Any]:
    floors = {"floor_random": 20.0, "floor_pixels": 30.0, "floor_patches": 45.0}
    line = {"step": step, "knn_top1": top1, "knn_interval": interval, "knn_tests": 400, "knn_images": images}
    return line | {"chance": 10.0} | floors


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (knn(9, 50.0), "It is learning: {} to 50.0% (+30.0 points, of which 1.4 may be chance)."),
        (knn(9, 21.5), "It is learning: {} to 21.5% (+1.5 points, of which 1.4 may be chance)."),
        (knn(9, 21.3), "No learning is visible: {} to 21.3% (+1.3 points, of which 1.4 may be chance)."),
        (knn(9, 24.0, 3.0), "It is learning: {} to 24.0% (+4.0 points, of which 3.2 may be chance)."),
        (knn(9, 23.0, 3.0), "No learning is visible: {} to 23.0% (+3.0 points, of which 3.2 may be chance)."),
    ],
)
def test_a_gain_counts_above_its_interval(last: dict[str, Any], sentence: str):
    """√(1² + 1²) = 1.41 and √(1² + 3²) = 3.16 points are what other test images would explain."""
    assert sentence.format("online kNN went from 20.0% (untrained)") in [*verdict(run(knn(0, 20.0), last))]


def test_older_runs_have_neither_floors_nor_intervals():
    told = [*verdict(run({"step": 0, "knn_top1": 20.0}, {"step": 9, "knn_top1": 22.0}))]
    assert told[0].startswith("Online kNN went from 20.0% (untrained) to 22.0% (+2.0 points).")
    assert not any("learning:" in sentence for sentence in told)
    assert not any("below" in sentence for sentence in told)
    assert results_table([run({"step": 9, "knn_top1": 22.0})]) == ""


def test_a_run_below_a_floor_is_told_so():
    told = [*verdict(run(knn(0, 20.0), knn(9, 29.0)))]
    assert (
        "At 29.0% it is below whitened patches (45.0%) and raw pixels (30.0%), which need no training."
        in told
    )
    assert not any("below" in sentence for sentence in verdict(run(knn(0, 20.0), knn(9, 50.0))))


def test_the_table_has_the_floors_of_the_last_online_knn():
    table = results_table([run(knn(0, 20.0), knn(9, 50.0, images=5000)), run({"step": 9, "knn_top1": 22.0})])
    assert (
        '<th scope="row">online kNN</th><td>50.0% ± 1.0 on 400 images, 5,000 neighbors</td><td>22.0%</td>'
        in table
    )
    assert '<th scope="row">  floor: whitened patches</th><td>45.0%</td><td>–</td>' in table
    assert '<th scope="row">  chance</th><td>10.0%</td><td>–</td>' in table
