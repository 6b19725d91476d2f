"""The long run, in seconds: its commands, its small file and its figure."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from momentum2.cli import main
from momentum2.recipes import find
from momentum2.settings import config_from_file, override
from momentum2.training.plan import resolve

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_its_file_and_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long, rng = load("long"), np.random.default_rng(0)
    for split, count in (("train", 16), ("test", 8)):
        for label in ("cat", "dog"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / label / f"{i}.png")
    small = {"model.width": 0.125, "train.batch_size": 8, "train.devices": 2, "monitor.log_every": 1}
    monkeypatch.setitem(long.ROWS, "recipe", small)
    monkeypatch.setattr(long, "NEIGHBORS", 20)
    codes = []

    def here(words: list[str]) -> Any:
        codes.append(main(words[3:]))
        return type("Ended", (), {"returncode": codes[-1]})

    monkeypatch.setattr(long.subprocess, "run", here)
    out, file = tmp_path / "long", tmp_path / "long.json"
    words = ["run", "--data", str(tmp_path / "images"), "--epochs", "2", "--out", str(out)]
    assert long.main(words) == 0
    assert long.main(words) == 0  # a finished run stays as it is
    assert codes == [0, 0, 0, 0]
    long.main(["read", "--out", str(out), "--page", str(file)])
    found = json.loads(file.read_text())
    (row,) = found["rows"]
    assert (row["epochs"], row["seed"], row["precision"]) == (2, 0, "fp32")
    assert (row["views"], row["images"]) == (4, 8)
    recipe = find("cifar10-cpu").config
    decay = config_from_file(out / "recipe" / "config.yaml").optim.weight_decay
    assert decay * 2 == pytest.approx(
        recipe.optim.weight_decay * recipe.train.epochs
    )  # in 2 epochs as in its own
    records = [json.loads(line) for line in (out / "recipe" / "metrics.jsonl").read_text().splitlines()]
    spent = {r["step"]: r["cpu_time"] for r in records if "cpu_time" in r}
    assert list(spent) == [1, 2, 3, 4, 5, 6, 7, 8]  # 32 images, 8 a step
    assert row["cpu_seconds"] == pytest.approx(sum(spent.values()), abs=0.06)
    seconds, knn = zip(*row["curve"], strict=True)
    halfway = sum(t for step, t in spent.items() if step <= 4)
    assert seconds == pytest.approx((0, halfway), abs=0.06)
    scores = [r["knn_top1"] for r in records if "knn_top1" in r]
    assert [*knn, row["knn"]] == scores  # the last has all 32 neighbors
    results = json.loads((out / "recipe" / "results.json").read_text())
    assert row["linear"] in [entry["accuracy"]["top1"] for entry in results.values()]
    assert set(found["floors"]) == {"random initialization", "raw pixels", "whitened patches"}
    assert all(set(floor) == {"curve", "knn", "linear"} for floor in found["floors"].values())
    pytest.importorskip("matplotlib", reason="plots need the reproduce extra")
    verdicts = load("verdicts")
    assert f"| {row['knn']:.1f} | {row['linear']:.1f} |" in verdicts.of_long(found)
    verdicts.plot_long(found, tmp_path / "long.svg")
    assert "whitened patches, linear" in (tmp_path / "long.svg").read_text()


@pytest.mark.parametrize("row", ["local-local", "local-momentum"])
def test_rows_about_devices_have_four_samples_on_each(row: str):
    config = override(find("cifar10-cpu").config, load("long").ROWS[row])
    plan = resolve(config, 50_000)
    assert (plan.student_bn, plan.teacher_bn) == (4, 4)


def test_a_command_that_is_stopped_ends_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = load("long")
    started = []

    def stopped(words: list[str]) -> Any:
        started.append(words[3])
        return type("Ended", (), {"returncode": 75})

    monkeypatch.setattr(long.subprocess, "run", stopped)
    assert long.main(["run", "--data", "images", "--out", str(tmp_path)]) == 75
    assert started == ["pretrain"]
