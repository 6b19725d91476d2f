"""Many runs at a glance: where each is, what it found, and how its settings differ from the others'."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from momentum2.errors import UserError
from momentum2.files import folders_below, real
from momentum2.runs.handle import Snapshot, differing_settings, read_run
from momentum2.runs.names import CONFIG

log = logging.getLogger("momentum2")


@dataclass(frozen=True)
class RunRow:
    """One run of several.

    Args:
        path: Its directory.
        name: Its path relative to the folder.
        finished: Whether training is finished.
        step: The last step that was logged.
        steps: The total number of steps, if known.
        metrics: The last value of each metric, such as `loss` and `knn_top1`.
        results: top1 of each evaluation, by its name, in percent.
        settings: The settings in which the runs differ.
    """

    path: Path
    name: str
    finished: bool
    step: int
    steps: int | None
    metrics: dict[str, float]
    results: dict[str, float]
    settings: dict[str, Any]


def find_runs(folder: Path) -> Iterator[Path]:
    """Run directories at or below a folder, by name; what is inside a run, such as its evaluations, is part of it."""
    for place, folders, files in folders_below(folder):
        if CONFIG in files:
            folders.clear()
            yield Path(place)
        folders[:] = [name for name in folders if not name.startswith(".")]


def compare(folder: Path) -> list[RunRow]:
    """The runs below a folder; one that cannot be read is left out, and named."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Pass one with run directories.")
    runs: list[Snapshot] = []
    for place in find_runs(folder):
        name = place.relative_to(folder).as_posix()
        try:
            runs.append(read_run(place, real(place).name if name == "." else name))
        except UserError as error:
            log.warning(f"{place} is skipped: {error}")
    if not runs:
        raise UserError(f"{folder} contains no run directory. Pass a folder with some.")
    return _rows(runs)


def _rows(runs: Sequence[Snapshot]) -> list[RunRow]:
    differ = differing_settings(runs)
    return [
        RunRow(
            run.directory,
            run.name,
            run.finished,
            run.step,
            run.steps,
            {name: value for record in run.records for name, value in record.items() if name != "step"},
            {name: entry["accuracy"]["top1"] for name, entry in run.results.items()},
            {name: run.settings.get(name) for name in differ},
        )
        for run in runs
    ]


def columns(rows: Sequence[RunRow]) -> list[list[str]]:
    """A table of text, its header first: run, state, loss, online kNN, evaluations, settings that differ."""
    results = list(dict.fromkeys(name for row in rows for name in row.results))
    metrics = [name for name in ("loss", "knn_top1") if any(name in row.metrics for row in rows)]
    settings = list(rows[0].settings) if rows else []
    table = [["run", "state", *metrics, *results, *settings]]
    for row in rows:
        total = f" of {row.steps:,}" if row.steps else ""
        state = "finished" if row.finished else f"step {row.step:,}{total}"
        numbers = [f"{row.metrics[name]:.4g}" if name in row.metrics else "–" for name in metrics]
        found = [f"{row.results[name]:.2f}" if name in row.results else "–" for name in results]
        table.append([row.name, state, *numbers, *found, *(_text(row.settings[name]) for name in settings)])
    return table


def _text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
