"""What a run says: `metrics.jsonl`, which is the truth, the terminal, and trackers, which follow it."""

import json
import logging
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from momentum2 import distributed
from momentum2.config import MonitorConfig
from momentum2.files import append
from momentum2.runs.metrics import keep_until, read_metrics
from momentum2.runs.names import METRICS
from momentum2.runs.trackers import Follower, check_installed, wanted
from momentum2.terminal import has_bars


def spread(z: Tensor) -> dict[str, float]:
    """How far outputs (N×d) are from collapse.

    `z_std` is 1 for directions spread evenly and 0 for a constant output; `z_rank` is the effective rank, the
    exponential of the entropy of the singular values, between 1 and min(N, d).
    """
    z = F.normalize(z.float(), dim=1)
    p = torch.linalg.svdvals(z - z.mean(0))
    p = p / p.sum().clamp_min(1e-12)
    entropy = -(p * p.clamp_min(1e-12).log()).sum()
    return {
        "z_std": float(z.std(0).mean() * math.sqrt(z.shape[1])),
        "z_rank": float(entropy.exp()),
    }


def on_host(values: Mapping[str, float | Tensor], z: Tensor | None) -> tuple[dict[str, float], Tensor | None]:
    """The values as numbers and `z` in fp32 in the host's memory; a GPU is waited for once."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    parts = [value.detach().float().reshape(1) for value in tensors.values()]
    if z is not None:
        parts.append(z.float().reshape(-1))
    read = torch.cat(parts).cpu()
    numbers = dict(zip(tensors, read[: len(tensors)].tolist(), strict=True))
    found = {name: numbers[name] if name in numbers else float(value) for name, value in values.items()}
    return found, None if z is None else read[len(tensors) :].view(z.shape)


log = logging.getLogger("momentum2")


class Meter:
    """Time and samples since the last line, so that speed and waiting are averages and not snapshots."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Leave out the time up to now: it was not spent on steps."""
        self.start, self.steps, self.images, self.waited = time.perf_counter(), 0, 0, 0.0
        self.cpu = time.process_time()

    def count(self, images: int, waited: float) -> None:
        self.steps, self.images, self.waited = self.steps + 1, self.images + images, self.waited + waited

    def read(self) -> dict[str, float]:
        """images_per_second, step_time, cpu_time (of a step) and data_wait (a fraction) since the last call."""
        seconds = max(time.perf_counter() - self.start, 1e-9)
        values = {
            "images_per_second": self.images / seconds,
            "step_time": seconds / max(self.steps, 1),
            "cpu_time": (time.process_time() - self.cpu) / max(self.steps, 1),
            "data_wait": self.waited / seconds,
        }
        self.restart()
        return values


class Log:
    """Writes a run's log from its main process; the others' calls do nothing."""

    def __init__(
        self, directory: Path, start: int, steps: int, steps_per_epoch: int, monitor: MonitorConfig
    ) -> None:
        self.main = distributed.is_main()
        self.steps, self.steps_per_epoch = steps, steps_per_epoch
        self.last_line = -math.inf
        self.followers: list[Follower] = []
        self.progress: Progress | None = None
        if not self.main:
            return
        for tracker in wanted(monitor):
            check_installed(tracker)  # before anything is changed
        self.path = directory / METRICS
        keep_until(self.path, start)
        self.file = append(self.path)
        self.followers = [Follower(directory, tracker) for tracker in wanted(monitor)]
        if has_bars():
            self.progress = Progress(
                TextColumn("epoch {task.fields[epoch]}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self.task = self.progress.add_task("", total=steps, completed=start, epoch=0, text="")

    def __enter__(self) -> Self:
        if self.progress:
            self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress:
            self.progress.stop()
        if self.main:
            self.file.close()
            for sentence in filter(None, [follower.end() for follower in self.followers]):
                log.warning(sentence)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Record values of `step`, and show them."""
        if not self.main:
            return
        self._write({"step": step, **values})
        if "loss" not in values:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.say(f"step {step:>{len(str(self.steps))}}/{self.steps}  {shown}")
            return
        text = (
            f"loss {values['loss']:.4f}  {values['images_per_second']:.0f} images/s  "
            f"data wait {values['data_wait']:.0%}"
        )
        if self.progress:
            epoch = f"{step / self.steps_per_epoch:.1f}"
            self.progress.update(self.task, completed=step, epoch=epoch, text=text)
        elif time.monotonic() - self.last_line > 5 or step == self.steps:
            self.last_line = time.monotonic()
            left = (self.steps - step) * values["step_time"]
            self.say(
                f"step {step:>{len(str(self.steps))}}/{self.steps}  epoch {step / self.steps_per_epoch:.1f}  {text}"
                f"  {timedelta(seconds=round(left))} left"
            )

    def has_validation(self, step: int) -> bool:
        """Whether the log has what a validation after `step` found; False on processes that do not log."""
        records = read_metrics(self.path) if self.main else []
        return any(r["step"] == step and not {"loss", "alarm"} & r.keys() for r in records)

    def alarm(self, step: int, sentence: str) -> None:
        """Record and show something that the user should look at."""
        if self.main:
            self._write({"step": step, "alarm": sentence})
            log.warning(sentence)

    def say(self, text: str) -> None:
        """Show a line."""
        if self.main:
            log.info(text)

    def _write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
