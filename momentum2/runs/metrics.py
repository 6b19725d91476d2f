"""`metrics.jsonl`: one object per line, each with its step."""

import json
from pathlib import Path
from typing import Any

from momentum2.files import write_whole


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
