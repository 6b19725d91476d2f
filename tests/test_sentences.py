"""Every sentence that a person reads, in one file: a change of wording is a change there, for all to see."""

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import momentum2

PACKAGE = Path(momentum2.__file__).parent
SENTENCES = Path(__file__).with_name("sentences.txt")
#: The exceptions that a person reads; of their arguments, those that are sentences.
ERRORS = {"UserError": 0, "SettingError": 1, "ProcessLost": 0}


def sentences(path: Path) -> Iterator[str]:
    """Sentences of a module; what is filled in is shown as `{expression}`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in ERRORS and len(node.args) > ERRORS[name]:
            words = _text(node.args[ERRORS[name]])
            setting = (
                _text(node.args[0]) or f"{{{ast.unparse(node.args[0])}}}" if name == "SettingError" else ""
            )
            yield from [f"{setting} {words}".strip()] if words else []
        elif name == "warning" and node.args and (words := _text(node.args[0])):
            yield words


def _text(node: ast.expr) -> str:
    """The template of a sentence; empty if it is not written there."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined,misc]
            for part in node.values
        )
    return ""


def collected() -> str:
    lines = [
        f"{path.relative_to(PACKAGE).as_posix()}: {sentence}".replace("\n", "\\n")
        for path in PACKAGE.rglob("*.py")
        for sentence in sentences(path)
    ]
    return "\n".join(sorted(set(lines))) + "\n"


def test_sentences_are_those_of_the_file():
    found = collected()
    if os.environ.get("UPDATE_SENTENCES"):
        SENTENCES.write_text(found, encoding="utf-8")
    assert found.splitlines() == SENTENCES.read_text(encoding="utf-8").splitlines(), (
        "If the new wording is meant, run: UPDATE_SENTENCES=1 python -m pytest tests/test_sentences.py"
    )


def test_sentences_end_with_a_mark():
    for line in SENTENCES.read_text(encoding="utf-8").splitlines():
        assert line.endswith((".", "?", "}")), line
