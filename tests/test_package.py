"""The package as it is installed, not as it lies in the source tree."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import momentum2
from momentum2.errors import shown

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_an_installed_copy_is_complete(tmp_path: Path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*install, "--no-build-isolation", "--no-index", "--target", str(tmp_path), str(ROOT)], check=True
    )
    source = {p.relative_to(ROOT / "momentum2") for p in (ROOT / "momentum2").rglob("*.py")}
    installed = {p.relative_to(tmp_path / "momentum2") for p in (tmp_path / "momentum2").rglob("*.py")}
    assert installed == source
    assert (tmp_path / "momentum2" / "py.typed").exists()
    assert (tmp_path / "bin" / "momentum2").exists()
    code = "import momentum2; print(momentum2.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(result.stdout.strip()).parent == tmp_path / "momentum2"


def test_the_citation_is_of_this_version_and_complete():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == momentum2.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert {"type", "title", "authors", "year", "url"} <= paper.keys()
    assert [author["family-names"] for author in paper["authors"]] == ["Li", "Liu", "Sun"]


def test_the_workflow_tests_every_python_that_is_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == promised
    assert project["requires-python"] == f">={promised[0]}"
    for line in re.findall(r"- run: (.*)", (ROOT / ".github" / "workflows" / "test.yml").read_text()):
        for target in re.findall(r"\bmake (\w+)", line):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_the_doctor_names_no_person_and_no_folder():
    lines = dict(momentum2.doctor(ROOT))
    assert lines["momentum2"] == momentum2.__version__
    assert float(lines["decoding"].split()[0].replace(",", "")) > 0
    assert float(lines["disk"].split()[0]) > 0
    assert re.match(r"\d+ allowed, \d+ free", lines["cores"])
    text = " ".join(lines.values())
    assert str(Path.home()) not in text
    assert str(ROOT) not in text
    assert all(shown(value) == value for value in lines.values())
