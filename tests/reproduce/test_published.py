"""The results that docs/results.md shows are those of the files it names."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = sorted((DOCS / "results" / "cifar").glob("*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda p: p.stem)
def test_every_number_comes_from_a_results_file_that_is_kept(path: Path):
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["rows"]
    for row in table["rows"]:
        assert row["mean"]["top-1"] == pytest.approx(mean(s["numbers"]["top-1"] for s in row["seeds"]))
        for seed in row["seeds"]:
            entries = json.loads((path.parent / seed["results"]).read_text(encoding="utf-8")).values()
            found = [e for e in entries if e["settings"]["seed"] == seed["seed"]]
            assert seed["numbers"]["top-1"] in [e["accuracy"]["top1"] for e in found]
            assert any(command.startswith("momentum2 pretrain ") for command in seed["commands"])


def test_every_link_of_the_page_leads_somewhere():
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert PUBLISHED
    for target in re.findall(r"\]\((?!http)([^)#]+)", page):
        assert (DOCS / target).exists(), target


@pytest.mark.parametrize(
    "name", ["bn-statistics", "bn-statistics-4-epochs", "moco-4-epochs", "bn-statistics-1-epochs"]
)
def test_a_table_on_the_page_is_that_of_its_file(name: str):
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    for row in json.loads((DOCS / "results" / "cifar" / f"{name}.json").read_text(encoding="utf-8"))["rows"]:
        spread = f" ± {row['std']['top-1']:.2f}" if len(row["seeds"]) > 1 else ""
        assert f"| {row['label']} | {row['mean']['top-1']:.2f}{spread} |" in page


def test_what_was_tried_is_on_the_page_as_in_its_file():
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    tries = json.loads((DOCS / "results" / "cifar10-cpu-tries.json").read_text(encoding="utf-8"))
    assert tries
    for tried in tries:
        cells = [f"{tried['knn'][e]:.1f}" if e in tried["knn"] else "" for e in "1234"]
        assert f"| {tried['label']} | {' | '.join(cells)} | {tried['rank']:.0f} |" in page
