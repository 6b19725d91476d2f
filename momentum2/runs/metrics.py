"""`metrics.jsonl`: one object per line, each with its step."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from momentum2.errors import UserError
from momentum2.files import parse_json, read_text, write_whole
from momentum2.runs.results import PATCHES, PIXELS, RANDOM, STARTED

#: The floors beside an online kNN, by the names that they have in its line.
FLOORS = {
    "floor_start": STARTED,
    "floor_random": RANDOM,
    "floor_pixels": PIXELS,
    "floor_patches": PATCHES,
}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a line that is none, such as the last one before a crash, is left out."""
    try:
        lines = read_text(path).split("\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Move it away.") from None
    return [record for line in lines if (record := parse_record(line)) is not None]


def parse_record(line: str) -> dict[str, Any] | None:
    """What was logged in a line: a step, numbers, and words by name."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or record["step"] < 0:
        return None
    words = {"alarm"}  # all else is numbers
    fits = all(isinstance(value, str if name in words else int | float) for name, value in record.items())
    return record if fits else None


def keep_until(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint that the run resumes from: those steps are run again."""
    if path.exists():
        before = read_metrics(path) if step else []  # a run that starts from scratch has logged nothing yet
        kept = [json.dumps(record) + "\n" for record in before if record["step"] <= step]
        write_whole(path, "".join(kept).encode())


def floors_in(record: Mapping[str, Any]) -> dict[str, float]:
    """The floors in a line of an online kNN, by their names in words."""
    return {name: float(record[key]) for key, name in FLOORS.items() if key in record}


def last_knn(records: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last line with an online kNN; empty if there is none."""
    return next((record for record in reversed([*records]) if "knn_top1" in record), {})
