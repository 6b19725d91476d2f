"""Imports in the package go downward only."""

import ast
from pathlib import Path

import momentum2

PACKAGE = Path(momentum2.__file__).parent

# From the ground up. A module may import from those before it, and from its own package.
LAYERS = [
    "errors",
    "seeds",
    "_torchvision",
    "distributed",
    "schedules",
    "config",
    "spelling",
    "settings",
    "norms",
    "weights",
    "backbones",
    "heads",
    "teacher",
    "optim",
    "augment",
    "data",
    "methods",
    "engine",
    "evaluate",
    "export",
    "recipes",
    "reproduce",
    "report",
    "cli",
    "__main__",
]


def imports_of(path: Path) -> set[str]:
    """Top-level parts of momentum2 that a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("momentum2.")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "momentum2":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_every_module_has_its_place():
    present = {path.stem if path.suffix else path.name for path in PACKAGE.iterdir()}
    present -= {"__init__", "__pycache__", "py"}
    present.discard("py.typed")
    assert present <= set(LAYERS)


def test_imports_go_downward():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if top == "__init__":
            continue
        allowed = set(LAYERS[: LAYERS.index(top) + 1]) | {"__version__"}
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in imports_of(path) - allowed]
    assert not wrong


def test_no_relative_imports():
    """They would hide from the check above."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


def test_only_the_command_line_reads_words():
    """Nothing else knows argparse or sys.argv; `reproduce/timing.py` is a program that torchrun starts."""
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if place.parts[0] == "cli" or place == Path("reproduce/timing.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "argparse" not in names, place
            assert not (isinstance(node, ast.ImportFrom) and node.module == "argparse"), place
            assert not (isinstance(node, ast.Attribute) and node.attr == "argv"), place
