"""Many runs at a glance."""

import csv
import json
from pathlib import Path

import pytest
import yaml

import momentum2 as m2
from momentum2.cli.main import main
from momentum2.runs.results import Accuracy, Result, write_result


def make_run(place: Path, lr: float, top1: float | None, finished: bool) -> None:
    place.mkdir(parents=True)
    settings = {"train": {"steps": 60}, "optim": {"lr": lr}, "data": {"name": "shapes"}}
    (place / "config.yaml").write_text(yaml.safe_dump(settings))
    records = [{"step": 10, "loss": 2.0}, {"step": 10, "knn_top1": 20.0}, {"step": 20, "loss": 1.5}]
    (place / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if top1 is not None:
        accuracy = Accuracy(top1, None, top1 - 1, top1 + 1, {}, 100)
        write_result(place / "results.json", Result("knn", "shapes test", "teacher", accuracy))
    if finished:
        (place / "encoder.safetensors").touch()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "runs" / "a", 0.1, 40.5, True)
    make_run(tmp_path / "runs" / "more" / "b", 0.2, None, False)
    make_run(tmp_path / "runs" / "a" / "linear" / "teacher", 0.3, None, True)  # part of run a
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.yaml").write_text("[")
    return tmp_path / "runs"


def test_rows(folder: Path, caplog: pytest.LogCaptureFixture):
    a, b = m2.compare_runs(folder)
    assert (a.name, a.finished, a.step, a.steps) == ("a", True, 20, 60)
    assert (b.name, b.finished, b.step, b.steps) == ("more/b", False, 20, 60)
    assert a.settings == {"optim.lr": 0.1}
    assert b.settings == {"optim.lr": 0.2}
    assert a.metrics == {"loss": 1.5, "knn_top1": 20.0}
    assert a.results == {"knn | shapes test | teacher": 40.5}
    assert b.results == {}
    assert "broken is skipped" in caplog.text


def test_a_run_by_itself(folder: Path):
    (row,) = m2.compare_runs(folder / "a")
    assert (row.name, row.settings) == ("a", {})


def test_the_command_prints_a_line_for_each_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["runs", str(folder), "--out", str(tmp_path / "runs.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "run",
        "state",
        "loss",
        "knn_top1",
        "knn",
        "|",
        "shapes",
        "test",
        "|",
        "teacher",
        "optim.lr",
    ]
    assert lines[1].split() == ["a", "finished", "1.5", "20", "40.50", "0.1"]
    assert lines[2].split() == ["more/b", "step", "20", "of", "60", "1.5", "20", "–", "0.2"]
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["knn | shapes test | teacher"] for row in rows] == ["40.50", "–"]


@pytest.mark.parametrize(
    ("what", "sentence"), [("none", "is not a folder"), (".", "contains no run directory")]
)
def test_mistakes(tmp_path: Path, what: str, sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main(["runs", str(tmp_path / what)]) == 2
    assert sentence in capsys.readouterr().err
