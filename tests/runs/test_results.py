"""`results.json`: of this version and of earlier ones."""

import json
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from momentum2.errors import UserError
from momentum2.runs.results import Accuracy, Result, read_results, write_result

ACCURACY = Accuracy(40.0, None, 30.0, 50.0, {}, 10)


def test_version_0_1_spelled_a_floor_differently(tmp_path: Path):
    path = tmp_path / "results.json"
    floor = asdict(Result("linear", "x", "random initialisation", ACCURACY))
    floors = {"random initialisation (cached)": 20.0, "raw pixels": 30.0}
    ours = asdict(Result("linear", "x", "teacher", ACCURACY, floors))
    path.write_text(json.dumps({"linear | x | random initialisation": floor, "linear | x | teacher": ours}))
    found = read_results(path)
    assert found["linear | x | random initialization"]["network"] == "random initialization"
    assert found["linear | x | teacher"]["floors"] == {
        "random initialization (cached)": 20.0,
        "raw pixels": 30.0,
    }
    write_result(
        path, Result("linear", "x", "random initialization", ACCURACY)
    )  # takes the place of the old one
    assert list(read_results(path)) == ["linear | x | random initialization", "linear | x | teacher"]
    assert "initialisation" not in path.read_text()


def test_what_is_not_results(tmp_path: Path):
    path = tmp_path / "results.json"
    assert read_results(path) == {}
    for text in ("", "[]", "{"):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a results file"):
            read_results(path)


def test_an_entry_that_is_none_is_left_out_but_not_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "results.json"
    sound = asdict(Result("knn", "x", "teacher", ACCURACY))
    odd = [3, [], {}, None, "text", sound | {"network": 1}, sound | {"accuracy": {"top1": "high"}}]
    path.write_text(json.dumps({"sound": sound} | {f"odd{i}": entry for i, entry in enumerate(odd)}))
    assert list(read_results(path)) == ["sound"]
    assert "odd3, which is not a result" in caplog.text
    write_result(path, Result("linear", "x", "teacher", ACCURACY))
    assert len(json.loads(path.read_text())) == len(odd) + 2


def test_evaluations_at_the_same_time_keep_every_result(tmp_path: Path):
    path = tmp_path / "results.json"
    names = [f"data {i}" for i in range(12)]
    several = [
        threading.Thread(target=write_result, args=(path, Result("knn", n, "teacher", ACCURACY)))
        for n in names
    ]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert {entry["data"] for entry in read_results(path).values()} == set(names)
