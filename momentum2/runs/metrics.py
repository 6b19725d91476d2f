"""`metrics.jsonl`: one object per line, each with its step."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from momentum2.files import write_whole
from momentum2.runs.results import PATCHES, PIXELS, RANDOM

#: The floors beside an online kNN, by the names that they have in its line.
FLOORS = {"floor_random": RANDOM, "floor_pixels": PIXELS, "floor_patches": PATCHES}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


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
