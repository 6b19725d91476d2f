"""Every name in docs/architecture.md exists."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"`(momentum2(?:\.\w+)+)`", TEXT)))
FILES = sorted(
    set(re.findall(r"`(momentum2/[\w/]+\.py)`", TEXT))
    - {f"momentum2/{d}/x.py" for d in ("methods", "norms", "export")}
)


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str):
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return
    raise AssertionError(name)


@pytest.mark.parametrize("file", FILES)
def test_the_file_exists(file: str):
    assert (ROOT / file).is_file()


def test_the_route_is_ten_files():
    assert len(FILES) == 10
    assert len(NAMES) > 15
