"""`results.json`: of this version and of earlier ones."""

import json
from pathlib import Path

import pytest

from momentum2.errors import UserError
from momentum2.runs.results import Accuracy, Result, read_results, write_result

ACCURACY = Accuracy(40.0, None, 30.0, 50.0, {}, 10)


def test_version_0_1_spelled_a_floor_differently(tmp_path: Path):
    path = tmp_path / "results.json"
    floor = {"evaluation": "linear", "network": "random initialisation", "floors": {}}
    ours = {"network": "teacher", "floors": {"random initialisation (cached)": 20.0, "raw pixels": 30.0}}
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
