"""What the training loop asks of a method, and nothing else."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from momentum2.schedules import Schedule


class Output(NamedTuple):
    """Result of one micro-batch: the loss, and the N×d outputs whose spread is watched for collapse."""

    loss: Tensor
    z: Tensor
    metrics: dict[str, Tensor]


class Method(nn.Module, ABC):
    """A network that turns the views of a batch into a loss.

    For step k the loop calls `before_step(k)`, then `forward` once per micro-batch, then the optimizer,
    then `after_step(k)`. All that must survive a restart is in parameters and persistent buffers.
    """

    #: Parameters whose names start so keep the peak learning rate for the whole run.
    constant_lr: tuple[str, ...] = ()

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self.schedule = schedule

    def before_step(self, k: int) -> None:
        """Set what the schedules give for step k."""

    @abstractmethod
    def forward(self, views: list[Tensor], labels: Tensor | None, shuffle: torch.Generator) -> Output:
        """Loss of one micro-batch; each view is N×3×S×S, normalised. `shuffle` is equal on all processes."""

    def after_step(self, k: int) -> None:
        """Update what the optimizer does not."""

    @abstractmethod
    def encoders(self) -> dict[str, nn.Module]:
        """The encoders by name: `student`, and `teacher` where there is one."""

    def drift(self) -> Tensor | None:
        """Distance of this step's batch statistics from the teacher's history, where there is one."""
        return None
