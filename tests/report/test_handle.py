"""Reading a run directory."""

import json
import shutil
from pathlib import Path

import pytest

from momentum2.errors import UserError
from momentum2.runs.handle import read_run, read_runs


def copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def test_a_run_is_read(run: Path):
    found = read_run(run)
    assert found.name == "run <b>"
    assert found.finished
    assert (found.step, found.steps) == (4, 4)
    assert found.settings["train.batch_size"] == 8
    assert found.last("loss") == [r["loss"] for r in found.records if "loss" in r][-1]
    assert found.last("nothing") is None
    assert found.bad_images == 0


@pytest.mark.parametrize(
    ("text", "data", "steps"),
    [
        ("steps       1,250 of 64 images (2 epochs)\n", None, 1250),  # as earlier versions wrote it
        ("steps       1,250 of 64 images\n", '{"steps": 30, "said": {}}', 30),
        ("steps       1,250 of 64 images\n", '{"steps": "many", "said": {}}', 1250),
        ("steps       1,250 of 64 images\n", "[" * 100_000, 1250),
        ("steps       ²\n", "{}", 4),  # as config.yaml says
        ("", '{"steps": 1e400, "said": {}}', 4),
    ],
)
def test_the_number_of_steps_is_that_of_the_plan(
    tmp_path: Path, run: Path, text: str, data: str | None, steps: int
):
    other = copy(run, tmp_path / "a")
    (other / "plan.txt").write_text(text)
    (other / "plan.json").unlink()
    if data is not None:
        (other / "plan.json").write_text(data)
    assert read_run(other).steps == steps


def test_time_is_that_of_all_steps(tmp_path: Path, run: Path):
    other = copy(run, tmp_path / "a")
    lines = [{"step": 0, "knn_top1": 1.0}, {"step": 10, "step_time": 2.0}, {"step": 30, "step_time": 1.0}]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_run(other).seconds() == [(0, 0.0), (10, 20.0), (30, 40.0)]


def test_alarms_are_apart_and_a_cut_line_is_no_matter(tmp_path: Path, run: Path):
    other = copy(run, tmp_path / "a")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "alarm": "Step 4: oh."}\n{"step": 5, "lo')
    found = read_run(other)
    assert found.alarms == [(4, "Step 4: oh.")]
    assert found.step == 4


def test_a_run_that_has_just_begun(tmp_path: Path, run: Path):
    shutil.copy(run / "config.yaml", tmp_path)
    found = read_run(tmp_path)
    assert (found.records, found.finished, found.step, found.last("loss")) == ([], False, 0, None)


def test_mistakes_are_sentences(tmp_path: Path, run: Path):
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="given twice"):
        read_runs([run, run])


def test_runs_of_one_name_are_told_apart(tmp_path: Path, run: Path):
    first, second = copy(run, tmp_path / "a" / "run"), copy(run, tmp_path / "b" / "run")
    assert [r.name for r in read_runs([first, second])] == [str(first), str(second)]
