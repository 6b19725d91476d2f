import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.metrics import top_k_accuracy_score

from momentum2.errors import UserError
from momentum2.evaluate.accuracy import bootstrap_interval, measure, say_result, top1_top5
from momentum2.runs.results import Result, read_results, write_result

NAMES = [f"class {c}" for c in range(8)]


def scores_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (500,), generator=g)
    scores = torch.randn(500, 8, generator=g)
    scores[torch.arange(500), labels] += 1
    return scores, labels


def a_result(evaluation: str = "knn", top1: float | None = None) -> Result:
    accuracy = measure(*scores_and_labels(), NAMES)
    if top1 is not None:
        accuracy = type(accuracy)(top1, *list(vars(accuracy).values())[1:])
    return Result(evaluation, "shapes test", "teacher", accuracy, {"raw pixels": 12.5}, {"k": 20})


def test_top1_and_top5_equal_those_of_scikit_learn():
    scores, labels = scores_and_labels()
    expected = [100 * top_k_accuracy_score(labels, scores, k=k) for k in (1, 5)]
    assert top1_top5(scores, labels) == pytest.approx(expected)


def test_ties_go_to_the_lower_class_and_nan_is_never_right():
    assert top1_top5(torch.zeros(8, 8), torch.arange(8)) == (12.5, 62.5)
    assert top1_top5(torch.full((8, 8), torch.nan), torch.arange(8)) == (0.0, 0.0)


def test_per_class_accuracy_averages_to_the_whole():
    scores, labels = scores_and_labels()
    labels[labels == 3] = 4  # a class without test images has no accuracy
    accuracy = measure(scores, labels, NAMES)
    assert list(accuracy.per_class) == [name for name in NAMES if name != "class 3"]
    counts = labels.bincount(minlength=8).double()
    weighted = sum(accuracy.per_class[n] * float(c) for n, c in zip(NAMES, counts, strict=True) if c)
    assert weighted / 500 == pytest.approx(accuracy.top1, abs=1e-3)
    assert accuracy.low < accuracy.top1 < accuracy.high
    assert measure(scores[:, :5], labels.clamp(max=4), NAMES[:5]).top5 is None


def test_the_interval_is_that_of_resampling():
    hits = np.random.default_rng(0).random(400) < 0.7
    resampled = np.random.default_rng(1).choice(hits, (20_000, 400)).mean(1)
    assert bootstrap_interval(hits, seed=0) == pytest.approx(
        100 * np.quantile(resampled, [0.025, 0.975]), abs=0.5
    )
    exact = 100 * binom(400, hits.mean()).ppf([0.025, 0.975]) / 400
    assert bootstrap_interval(hits, seed=5) == pytest.approx(exact, abs=0.5)
    assert bootstrap_interval(hits, seed=3) == bootstrap_interval(hits, seed=3)


def test_results_are_merged_by_name(tmp_path: Path):
    path = tmp_path / "results.json"
    write_result(path, a_result("knn"))
    write_result(path, a_result("linear"))
    write_result(path, a_result("knn", top1=1.0))
    found = read_results(path)
    assert list(found) == ["knn | shapes test | teacher", "linear | shapes test | teacher"]
    assert json.loads(path.read_text())["knn | shapes test | teacher"]["accuracy"]["top1"] == 1.0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".results.lock", "results.json"]


def test_a_class_whose_name_is_not_utf8(tmp_path: Path):
    result = replace(a_result(), settings={"class": "caf\udce9"})
    write_result(tmp_path / "results.json", result)
    (tmp_path / "results.json").read_text(encoding="utf-8")
    (found,) = read_results(tmp_path / "results.json").values()
    assert found["settings"] == {"class": "caf\udce9"}


def test_a_foreign_file_is_not_overwritten(tmp_path: Path):
    path = tmp_path / "results.json"
    path.write_text("[1, 2")
    with pytest.raises(UserError, match="not a results file"):
        write_result(path, a_result())
    assert path.read_text() == "[1, 2"


def test_a_result_is_said(caplog: pytest.LogCaptureFixture):
    result = a_result()
    with caplog.at_level(logging.INFO, "momentum2"):
        say_result(result)
    shown = "\n".join(caplog.messages)
    assert f"top-1  {result.accuracy.top1:.2f}%" in shown
    assert "12.50%  raw pixels" in shown
