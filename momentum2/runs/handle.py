"""What a run directory says about its run."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from momentum2.config import Config
from momentum2.errors import UserError
from momentum2.files import read_text, real
from momentum2.runs.metrics import floors_in, last_knn, read_metrics
from momentum2.runs.names import BAD_IMAGES, CONFIG, ENCODER, METRICS, PLAN, RESULTS
from momentum2.runs.planned import read_plan
from momentum2.runs.results import read_results
from momentum2.settings import config_from_file


class Run:
    """A run directory: a handle that reads its files when asked, and holds no lock.

    It can be passed wherever a path can.
    """

    def __init__(self, directory: str | os.PathLike[str], finished: bool = False) -> None:
        self.path = Path(directory)
        self._finished = finished  # as the process that trained it knows, which may not see the files

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> Config:
        """Its settings."""
        return config_from_file(self.path / CONFIG)

    @property
    def finished(self) -> bool:
        """Whether training is finished."""
        return self._finished or (self.path / ENCODER).exists()

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((int(record["step"]) for record in self.metrics()), default=0)

    @property
    def alarms(self) -> list[tuple[int, str]]:
        """(step, sentence) of each problem."""
        return [(line["step"], line["alarm"]) for line in self.lines() if "alarm" in line]

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, one mapping per line, each with its `step`."""
        return [line for line in self.lines() if "alarm" not in line]

    @property
    def floors(self) -> dict[str, float]:
        """top1 without training, with the neighbors of the last online kNN; empty if there was none."""
        return floors_in(last_knn(self.metrics()))

    def results(self) -> dict[str, dict[str, Any]]:
        """What evaluations found, by name."""
        return read_results(self.path / RESULTS)

    def lines(self) -> list[dict[str, Any]]:
        """Everything that was logged, including alarms."""
        return read_metrics(self.path / METRICS) if (self.path / METRICS).exists() else []


@dataclass(frozen=True)
class Snapshot:
    """The files of one run, read at one moment.

    Args:
        directory: Where they are.
        name: What the page calls the run.
        config: Its settings.
        records: Lines of `metrics.jsonl` with values.
        alarms: (step, sentence) of the others.
        results: What `evaluate` found, by name.
        plan: `plan.txt`, or empty.
        bad_images: Number of images that could not be read.
        finished: Whether training is finished.
        steps: The total number of steps, if known.
    """

    directory: Path
    name: str
    config: Config
    records: list[dict[str, Any]]
    alarms: list[tuple[int, str]]
    results: dict[str, dict[str, Any]]
    plan: str
    bad_images: int
    finished: bool
    steps: int | None = None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """`{"train.seed": 0, …}`."""
        sections = asdict(self.config).items()
        return {f"{section}.{name}": value for section, part in sections for name, value in part.items()}

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((int(record["step"]) for record in self.records), default=0)

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        return next((record[name] for record in reversed(self.records) if name in record), None)

    def seconds(self) -> list[tuple[int, float]]:
        """(step, time spent in steps until then) of each line that has a step's time."""
        found, before, total = [(0, 0.0)], 0, 0.0
        for record in self.records:
            if "step_time" in record:
                total += record["step_time"] * (record["step"] - before)
                before = record["step"]
                found.append((before, total))
        return found


def differing_settings(runs: Sequence[Snapshot]) -> list[str]:
    """The names of the settings that are not the same in all runs."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        name for name in names if any(run.settings.get(name) != runs[0].settings.get(name) for run in runs)
    ]


def check_run(directory: Path) -> None:
    """Raise a `UserError` if there is no run in a directory."""
    if not (directory / CONFIG).is_file():
        raise UserError(
            f"{directory} is not a run directory: it has no {CONFIG}. Pass one that pretrain made."
        )


def read_run(directory: Path, name: str = "") -> Snapshot:
    """Read a run directory; only its `config.yaml` must be there."""
    check_run(directory)
    run = Run(directory)
    lines, config = run.lines(), run.config
    return Snapshot(
        directory,
        name or real(directory).name,
        config,
        [line for line in lines if "alarm" not in line],
        [(line["step"], line["alarm"]) for line in lines if "alarm" in line],
        run.results(),
        _text(directory / PLAN),
        len(_text(directory / BAD_IMAGES).splitlines()),
        run.finished,
        read_plan(directory).steps or config.train.steps,
    )


def read_runs(directories: list[Path]) -> list[Snapshot]:
    """Read several, and give each a name of its own."""
    names = [real(directory).name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    if len(set(names)) < len(names):
        raise UserError("The same run is given twice. Pass each run once.")
    return [read_run(directory, name) for directory, name in zip(directories, names, strict=True)]


def _text(path: Path) -> str:
    try:
        return read_text(path) if path.exists() else ""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). Move it away.") from None
