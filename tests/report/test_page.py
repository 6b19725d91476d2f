"""The page as a file: what is in it, and what it says where something is missing."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from momentum2.api import pretrain
from momentum2.errors import UserError
from momentum2.report import ReportOptions, write_last_report, write_report
from momentum2.settings import config_from_file


def copy(run: Path, to: Path) -> Path:
    shutil.copytree(run, to)
    return to


def notes(page: Path) -> list[str]:
    return re.findall(r'<p class="note">(.*?)</p>', page.read_text(encoding="utf-8"))


def change(run: Path, before: str, after: str) -> None:
    config = run / "config.yaml"
    assert before in config.read_text()
    config.write_text(config.read_text().replace(before, after))


def test_one_file_of_a_bearable_size(run: Path, tmp_path: Path):
    page = write_report([run], tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert page.stat().st_size < 500_000
    assert notes(page) == []
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_report_is_in_the_run_and_is_refreshed(run: Path, tmp_path: Path):
    other = copy(run, tmp_path / "run")
    assert write_last_report(other) == f"Report: {other / 'report.html'}"
    (other / "report.html").write_text("old")
    write_last_report(other)
    assert (other / "report.html").stat().st_size > 10_000


def test_images_and_weights_that_are_gone_are_two_lines(run: Path, tmp_path: Path):
    other = copy(run, tmp_path / "run")
    (other / "encoder.safetensors").unlink()
    shutil.rmtree(other / "checkpoints")
    change(other, "root: ", "root: /nowhere")
    found = notes(write_report([other]))
    assert len(found) == 2
    assert "has no encoder.safetensors and no intact checkpoint yet" in found[0]
    assert "does not exist" in found[1]


def test_images_without_labels(run: Path, tmp_path: Path):
    other = copy(run, tmp_path / "run")
    shutil.copytree(run.parent / "data" / "test", tmp_path / "flat")
    text = (other / "config.yaml").read_text()
    text = text.replace("name: list", "name: folder").replace(
        f"root: {run.parent / 'data'}", f"root: {tmp_path / 'flat'}"
    )
    text = text.replace("test_split: test", "test_split: train")
    (other / "config.yaml").write_text(text)
    found = notes(write_report([other]))
    assert len(found) == 1
    assert "the images are unlabeled" in found[0]


def test_several_runs_show_how_they_differ(run: Path, tmp_path: Path):
    first, second = copy(run, tmp_path / "first"), copy(run, tmp_path / "second")
    change(second, "lr: 0.05", "lr: 0.07")
    accuracy = {"top1": 71.25, "top5": None, "low": 70.0, "high": 72.5, "per_class": {}, "images": 10}
    result = {
        "evaluation": "knn",
        "data": "x",
        "network": "teacher",
        "accuracy": accuracy,
        "floors": {"raw pixels": 30.0},
    }
    (second / "results.json").write_text(json.dumps({"knn | x | teacher": result}))
    page = write_report([first, second])
    assert page == tmp_path / "report.html"
    text = page.read_text(encoding="utf-8")
    row = '<tr><th scope="row">optim.lr</th><td>0.05</td><td>0.07</td></tr>'
    assert row in text
    assert text.count('<th scope="row">optim.') == 1  # nothing else differs
    assert (
        '<th scope="row">knn | x | teacher</th><td>–</td><td>71.2% (70.0 to 72.5) on 10 images</td>' in text
    )
    assert "knn on x: 41.2 points above the best floor" in text
    sprites = re.search(r'id="sprites">(.*?)</script>', text)
    assert sprites is not None
    assert len(json.loads(sprites[1])) == 1  # the same images, once


def test_a_network_that_has_become_no_number(run: Path, tmp_path: Path):
    other = copy(run, tmp_path / "run")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": NaN, "step_time": 1.0, "z_std": Infinity}\n')
        file.write('{"step": 5, "alarm": "Step 5: <i>the loss</i> is no number."}\n')
    text = write_report([other]).read_text(encoding="utf-8")
    assert "Step 5: &lt;i&gt;the loss&lt;/i&gt; is no number." in text
    assert "<dd>no number</dd>" in text


def test_mistakes_are_sentences(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match="Pass a run directory"):
        write_report([])
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        write_report([tmp_path])
    with pytest.raises(UserError, match=r"^points must be at least 3"):
        write_report([run], options=ReportOptions(points=2))
    with pytest.raises(UserError, match="cannot be written"):
        write_report([run], tmp_path / "no" / "page.html")


def test_nothing_that_goes_wrong_fails_the_run(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch):
    assert write_last_report(tmp_path).startswith("No report: ")
    other = copy(run, tmp_path / "run")
    (other / "metrics.jsonl").write_text('{"step": "many", "loss": 1.0}\n')  # left out
    assert write_last_report(other).startswith("Report: ")
    monkeypatch.setattr("momentum2.report.page.write_report", lambda runs: 1 / 0)
    assert write_last_report(other).startswith("No report (ZeroDivisionError: ")


def test_norms_that_choose_alpha_are_listed_with_it(run: Path, tmp_path: Path):
    other = copy(run, tmp_path / "run")
    assert "α by norm" not in write_report([other]).read_text(encoding="utf-8")

    config = config_from_file(run / "config.yaml")
    method = replace(config.method, alpha="auto")
    train = replace(config.train, devices=4)
    pretrain(replace(config, method=method, train=train), tmp_path / "auto")
    (*_, last) = sorted((tmp_path / "auto" / "checkpoints").iterdir())
    rows = load_file(last / "devices.safetensors")
    alphas = {name: rows[name].tolist() for name in rows if name.endswith(".alpha")}
    assert len(alphas) > 10
    page = write_report([tmp_path / "auto"]).read_text(encoding="utf-8")
    part = page.partition("<h3>α by norm</h3>")[2].partition("</section>")[0]
    assert "after 4 steps" in part
    found = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>', part)
    names = [name for name, *_ in found]
    assert {f"method/{name}.alpha" for name in names} == set(alphas)
    assert names[0].endswith("encoder.bn1")
    assert names[-1].startswith("teacher.network.projector")
    for name, *numbers in found:
        flat = [value for (value,) in alphas[f"method/{name}.alpha"]]
        assert len(flat) == 4
        expected = sum(flat) / 4, min(flat), max(flat)
        assert [float(n) for n in numbers] == pytest.approx(expected, rel=0.006)

    shutil.rmtree(tmp_path / "auto" / "checkpoints")
    assert any("has no checkpoint yet" in line for line in notes(write_report([tmp_path / "auto"])))
