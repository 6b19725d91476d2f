"""One optimizer step. The loop, `plan --probe` and the timing of tables all take this one."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from momentum2 import distributed
from momentum2.config import OptimConfig, TrainConfig
from momentum2.methods import Method, Output
from momentum2.methods.method import place_of_student
from momentum2.optim import set_lr
from momentum2.seeds import derive
from momentum2.training.device import use_bf16


class Taken(NamedTuple):
    """A step's loss and gradient norm, the last micro-batch's output, what was watched, and whether to stop."""

    loss: Tensor
    norm: Tensor
    output: Output
    watched: Mapping[str, float | Tensor]
    stop: bool


class Stepper:
    """Takes the optimizer steps of a method, on all processes together.

    Args:
        method: In training mode, on its device.
        optimizer: Of its parameters.
        train: Seed, micro-batches, precision and whether to compile.
        optim: The norm to which gradients are clipped.
        device: Where it computes.
        frozen: Steps in whose beginning the encoder stays as it is.
    """

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        optim: OptimConfig,
        device: torch.device,
        frozen: int = 0,
    ) -> None:
        self.method, self.optimizer, self.train, self.device = method, optimizer, train, device
        place = place_of_student(method)
        self.frozen, self.held = frozen, list(place[1].parameters()) if place and frozen else []
        self.largest_norm = optim.clip_norm or float("inf")
        self.parameters = [p for p in method.parameters() if p.requires_grad]
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=use_bf16(train.precision, device))
        # Buffers stay with their process: whose statistics count is the method's business.
        self.parallel: DistributedDataParallel | None = None
        model: nn.Module = method
        if distributed.world_size() > 1:
            model = self.parallel = distributed.data_parallel(method)
        self.model = torch.compile(model) if train.compile else model

    def __call__(
        self,
        k: int,
        lr: float,
        inputs: Callable[[int], tuple[Any, ...]],
        check: Callable[[Tensor], bool] = lambda value: False,
        watch: bool = False,
    ) -> Taken:
        """Take step k.

        Args:
            k: Steps done before it.
            lr: Learning rate.
            inputs: Arguments of the method for micro-batch i.
            check: Called with a number that is not finite if something is wrong, before the weights are touched; says
                whether to stop after this step.
            watch: Ask the method what is worth logging.
        """
        torch.manual_seed(derive(self.train.seed, k, distributed.rank()))  # of dropout and its like
        set_lr(self.optimizer, lr)
        self.method.before_step(k)
        loss, count = torch.zeros((), device=self.device), self.train.accumulate
        for i in range(count):
            last = i == count - 1
            with self.parallel.no_sync() if self.parallel and not last else nullcontext():
                with self.autocast:
                    output: Output = self.model(*inputs(i))
                (output.loss / count).backward()
            loss += output.loss.detach() / count
        if k < self.frozen:  # without gradients an optimizer passes them by, and keeps no state of them
            for parameter in self.held:
                parameter.grad = None
        norm = clip_grad_norm_(self.parameters, self.largest_norm)
        stop = check(loss + norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        watched = self.method.watch(k) if watch else {}
        self.method.after_step(k)
        return Taken(loss, norm, output, watched, stop)
