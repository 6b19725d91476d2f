"""What the loop is given."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from momentum2.config import MonitorConfig, OptimConfig, TrainConfig
from momentum2.methods import Method


class StepBatch(Protocol):
    """This process's part of the batch of one step."""

    @property
    def step(self) -> int: ...

    @property
    def wait(self) -> float:
        """Seconds that the loop waited for it."""

    def inputs(self, i: int, n: int) -> tuple[Any, ...]:
        """Arguments of the method for micro-batch i of n."""
        ...


@dataclass(frozen=True)
class Job:
    """What `fit` turns. Everything in it is a function of the config, and batches are one of the step too."""

    method: Method
    batches: Callable[[int], AbstractContextManager[Iterable[StepBatch]]]  # from this step on
    lr: Callable[[int], float]
    steps: int
    steps_per_epoch: int
    lr_peak: float
    train: TrainConfig
    optim: OptimConfig
    monitor: MonitorConfig
    device: torch.device
    validate: Callable[[int], dict[str, float]] | None = None  # after so many steps
    validate_every: int = 0  # steps; the last step is always validated
    decided: Mapping[str, object] = field(default_factory=dict)  # by images and machine; kept for a resume

    def is_due(self, done: int) -> bool:
        """Whether there is a validation after `done` steps."""
        return done in (0, self.steps) or bool(self.validate_every and done % self.validate_every == 0)
