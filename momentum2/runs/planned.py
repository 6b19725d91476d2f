"""What a run resolved to: `plan.txt` for people, and the same as data in `plan.json`."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from momentum2.files import read_json, read_text, write_whole
from momentum2.runs.names import PLAN, PLAN_DATA

_COLUMN = 12  # letters before a value in plan.txt


class Planned(NamedTuple):
    """The plan of a run, as far as it is known.

    Args:
        steps: Their total.
        said: The lines that a person is shown, by what they are about.
    """

    steps: int | None
    said: dict[str, str]


def write_plan(run: Path, steps: int, lines: Sequence[tuple[str, str]]) -> list[str]:
    """Write the plan, (what, value) lines; returns them as text."""
    told = [f"{name:<{_COLUMN}}{value}" for name, value in lines]
    write_whole(run / PLAN, "".join(f"{line}\n" for line in told).encode())
    write_whole(run / PLAN_DATA, json.dumps({"steps": steps, "said": dict(lines)}, indent=1).encode())
    return told


def read_plan(run: Path) -> Planned:
    """The plan of a run; of one that an earlier version began, what its `plan.txt` shows."""
    with suppress(OSError, ValueError):
        return _checked(read_json(run / PLAN_DATA))
    said: dict[str, str] = {}
    with suppress(OSError):
        lines = read_text(run / PLAN).splitlines()
        said = {line[:_COLUMN].strip(): line[_COLUMN:].strip() for line in lines}
    steps = said.get("steps", "").partition(" ")[0].replace(",", "")
    return Planned(int(steps) if steps.isdecimal() and len(steps) < 13 else None, said)


def _checked(found: object) -> Planned:
    steps, said = (found.get("steps"), found.get("said")) if isinstance(found, dict) else (None, None)
    if type(steps) is not int or not 0 < steps < 10**12 or not isinstance(said, dict):
        raise ValueError("it is not the plan of a run")
    return Planned(steps, {str(name): str(value) for name, value in said.items()})
