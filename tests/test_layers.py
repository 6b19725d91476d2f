"""Imports in the package go downward only."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import momentum2

PACKAGE = Path(momentum2.__file__).parent

# From the ground up. A room may import from those of the rows above its own, and within itself; the modules of the
# first row, each other in this order.
GROUND = [
    "errors",
    "seeds",
    "schedules",
    "files",
    "config",
    "spelling",
    "yaml_settings",
    "settings",
    "machine",
    "terminal",
    "_torchvision",
    "_importing",
]
PIECES = ["norms", "weights", "backbones", "heads", "teacher", "muon", "optim", "augment"]
ROWS: list[list[str]] = [
    *([name] for name in GROUND),
    ["distributed"],
    *([name] for name in PIECES),
    ["data"],
    ["methods"],
    ["runs"],
    ["training"],
    ["evaluate"],
    ["detection"],
    ["export", "recipes", "report"],
    ["reproduce"],
    ["api"],
    ["cli"],
    ["__main__"],
]
#: Finer than that: who may not import whom although the row would allow it.
FORBIDDEN = {
    "data": {"norms", "weights", "backbones", "heads", "teacher", "optim"},
    "runs": {"methods"},
    "reproduce": {"export", "report"},
}
#: Where documented imports of earlier versions still lead; nothing of ours goes by it.
OLD = {"engine"}


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


def modules() -> Iterator[tuple[str, Path]]:
    """(room, file) of each file in a room."""
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in {"__init__", *OLD}:
            yield room, path


def test_every_room_has_its_place():
    assert {room for room, _ in modules()} == {room for row in ROWS for room in row}


def test_imports_go_downward():
    wrong = []
    for room, path in modules():
        row = next(i for i, rooms in enumerate(ROWS) if room in rooms)
        below = {name for rooms in ROWS[:row] for name in rooms} - FORBIDDEN.get(room, set())
        allowed = below | {room, "__version__"}
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in imports_of(path) - allowed]
    assert not wrong


def test_names_of_run_files_are_said_in_one_place():
    from momentum2.runs import names

    values = {value for name, value in vars(names).items() if name.isupper()} - {
        names.STEP,
        names.TENSORBOARD,
        names.LOCK,
    }
    for room, path in modules():
        if path == Path(names.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant):
                assert node.value not in values, (
                    f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value} ({room})"
                )


def test_files_are_renamed_in_one_place():
    """So that each is whole or not there, and nobody's link is written through."""
    for room, path in modules():
        if room == "files":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                owner = getattr(node.value, "id", "")
                assert node.attr not in ("rename", "renames"), where
                assert (owner, node.attr) not in (("os", "replace"), ("shutil", "move")), where
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "replace":
                # That of a text has two arguments, that of a path one.
                assert len(node.args) + len(node.keywords) != 1, f"{path.relative_to(PACKAGE)}:{node.lineno}"


#: Inside a folder that is whole or not there, whose name nobody can guess.
_IN_A_NEW_FOLDER = {"data/packing.py"}


def test_files_are_written_in_one_place():
    for room, path in modules():
        place = path.relative_to(PACKAGE).as_posix()
        if room == "files" or place in _IN_A_NEW_FOLDER:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            assert name not in ("write_text", "write_bytes"), f"{place}:{node.lineno}"
            assert name != "savefig" or ast.unparse(node.args[0]) == "file", f"{place}:{node.lineno}"
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            words += [k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)]
            modes = {w for w in words if isinstance(w, str) and re.fullmatch(r"[wax][bt+]{0,2}", w)}
            assert not (name == "open" and modes), f"{place}:{node.lineno}"


def test_no_module_has_the_name_of_another():
    names = Counter(path.stem for _, path in modules() if path.stem not in ("__init__", "__main__"))
    twice = {name for name, count in names.items() if count > 1}
    assert not twice


def test_no_class_has_the_name_of_another():
    names = Counter(
        node.name
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


def test_the_modules_of_a_room_have_an_order_too():
    """No module imports itself by way of others, not even inside functions."""
    named = {
        ".".join(["momentum2", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): path
        for _, path in modules()
    }
    graph: dict[str, set[str]] = {}
    for name, path in named.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                below = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {one if one in named else node.module for one in below}
        graph[name] = found & set(named) - {name}
    assert len(graph) > 150
    assert sum(map(len, graph.values())) > 500
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_relative_imports():
    """They would hide from the check above."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


def _is(node: ast.expr, word: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == word


def test_only_the_command_line_knows_flags():
    """A mistake carries its setting, and the command line makes a flag of it: the sentence is right from Python too."""
    # Commands as text are what these are about; the details of a report also have CSS variables.
    exempt = {"cli", "recipes.py", "reproduce", "report/details.py", "export/detectron2.py"}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if {place.parts[0], place.as_posix()} & exempt:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        fine = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        # A whole command to copy is right from Python, too.
        lists = (node.elts for node in ast.walk(tree) if isinstance(node, ast.List))
        fine |= {id(word) for words in lists if words and _is(words[0], "momentum2") for word in words}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in fine:
                assert not re.search(r"--[a-z]", node.value), f"{place}:{node.lineno}: {node.value}"


#: Who may name a method: what is about one of them. The rest knows methods by the attributes of their class.
_OF_METHODS = {"methods", "config.py", "recipes.py", "reproduce", "spelling.py"}
#: Linear evaluation is supervised training; view recipes and protocols have the names of the papers they come from.
_NAMESAKES = {"evaluate/classifier.py", "evaluate/linear.py", "evaluate/protocols.py", "augment/specs.py"}


def test_nothing_else_names_a_method():
    from momentum2.methods import METHODS

    names = {*METHODS, *(kind.__name__ for kind in METHODS.values())}
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if {place.parts[0], place.as_posix()} & (_OF_METHODS | _NAMESAKES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said = {node.value} if isinstance(node, ast.Constant) else set()
            said |= {node.id} if isinstance(node, ast.Name) else set()
            said |= {node.attr} if isinstance(node, ast.Attribute) else set()
            assert not said & names, f"{place}:{node.lineno}: {said & names}"


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
