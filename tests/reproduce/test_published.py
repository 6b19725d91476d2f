"""The results that docs/results.md shows are those of the files it names."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = sorted((DOCS / "results" / "cifar").glob("*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_accuracies_come_from_files_that_are_kept(path: Path):
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["rows"]
    for row in table["rows"]:
        for column in ("top-1", "kNN"):
            assert row["mean"][column] == pytest.approx(mean(s["numbers"][column] for s in row["seeds"]))
        for seed in row["seeds"]:
            results = path.parent / seed["results"]
            entries = json.loads(results.read_text(encoding="utf-8")).values()
            found = [e for e in entries if e["settings"]["seed"] == seed["seed"]]
            assert seed["numbers"]["top-1"] in [e["accuracy"]["top1"] for e in found]
            *_, last = (results.parent / "knn.jsonl").read_text(encoding="utf-8").splitlines()
            assert seed["numbers"]["kNN"] == json.loads(last)["knn_top1"]
            assert any(command.startswith("momentum2 pretrain ") for command in seed["commands"])


def test_every_link_of_the_page_leads_somewhere():
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert PUBLISHED
    for target in re.findall(r"\]\((?!http)([^)#]+)", page):
        assert (DOCS / target).exists(), target


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_a_table_on_the_page_is_that_of_its_file(path: Path):
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    table = json.loads(path.read_text(encoding="utf-8"))
    assert f"results/cifar/{path.name}" in page
    for row in table["rows"]:
        cells = [row["label"]]
        for column in table["columns"]:
            digits = 3 if column == "seconds" else 2
            spread = f" ± {row['std'][column]:.{digits}f}" if column in row["std"] else ""
            cells.append(f"{row['mean'][column]:.{digits}f}{spread}")
        assert f"| {' | '.join(cells)} | {len(row['seeds'])} |" in page


@pytest.mark.parametrize("name", ["bn-statistics.json", "bn-statistics-10-epochs.json"])
def test_the_way_of_a_run_is_on_the_page_as_in_its_file(name: str):
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    path = DOCS / "results" / "cifar" / name
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        for seed in row["seeds"]:
            lines = (
                (path.parent / seed["results"])
                .with_name("knn.jsonl")
                .read_text(encoding="utf-8")
                .splitlines()
            )
            _untrained, *way = [json.loads(line)["knn_top1"] for line in lines]
            cells = [f"{value:.1f}" for value in (*way, seed["numbers"]["top-1"])]
            assert f"| {' | '.join(cells)} |" in page


def test_what_was_tried_is_on_the_page_as_in_its_file():
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    tries = json.loads((DOCS / "results" / "cifar10-cpu-tries.json").read_text(encoding="utf-8"))
    assert tries
    for tried in tries:
        cells = [f"{tried['knn'][e]:.1f}" if e in tried["knn"] else "" for e in "1234"]
        assert f"| {tried['label']} | {' | '.join(cells)} | {tried['rank']:.0f} |" in page


def test_the_screens_are_on_the_page_as_in_their_file():
    page = (DOCS / "learning.md").read_text(encoding="utf-8")
    screens = json.loads(
        (DOCS.parent / "benchmarks" / "results" / "learning.json").read_text(encoding="utf-8")
    )
    assert screens["rows"]
    for row in screens["rows"]:
        assert f"| {row['label']} | {row['steps']} | {row['knn']:.1f} | {row['linear']:.1f} |" in page
