"""What docs show was measured: the page of results is what its script writes from the files that are kept."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"


@pytest.fixture(scope="module")
def verdicts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("verdicts", DOCS.parent / "benchmarks" / "verdicts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes(verdicts: ModuleType):
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    assert page == verdicts.page(RESULTS)
    assert len(page.splitlines()) <= 200
    found = json.loads((RESULTS / "stability" / "stability.json").read_text(encoding="utf-8"))
    text = (RESULTS / "stability" / "stability.md").read_text(encoding="utf-8")
    assert text == verdicts.stability_page.markdown(found)


def test_what_the_page_is_written_from_is_small_and_all_there():
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)", page):
        assert (DOCS / target).exists(), target
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert not any(re.search(r"/(tmp|home|work|root)/", path.read_text(encoding="utf-8")) for path in files)


def test_the_screens_are_on_the_page_as_in_their_file():
    page = (DOCS / "learning.md").read_text(encoding="utf-8")
    screens = json.loads(
        (DOCS.parent / "benchmarks" / "results" / "learning.json").read_text(encoding="utf-8")
    )
    assert screens["rows"]
    for row in screens["rows"]:
        assert f"| {row['label']} | {row['steps']} | {row['knn']:.1f} | {row['linear']:.1f} |" in page
