"""One optimizer step. The loop, `plan --probe` and the timing of tables all take this one."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

from momentum2 import distributed
from momentum2.config import OptimConfig, TrainConfig
from momentum2.errors import UserError
from momentum2.methods import Method, Output, ViewByView
from momentum2.methods.method import place_of_student
from momentum2.optim import set_lr
from momentum2.seeds import derive
from momentum2.training.by_view import ByView, Threads
from momentum2.training.device import autocast_dtype, computing_in

#: What a checkpoint keeps of fp16's loss scale, and torch's names for it.
SCALER = {"scale": "scale", "growth": "_growth_tracker"}


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
        threads: Of the CPU; None leaves them as they are. `self.threads` are those of the next step.
        frozen: Steps in whose beginning the encoder stays as it is.
    """

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        optim: OptimConfig,
        device: torch.device,
        threads: Threads | None = None,
        frozen: int = 0,
    ) -> None:
        self.method, self.optimizer, self.train, self.device = method, optimizer, train, device
        place = place_of_student(method)
        self.frozen, self.held = frozen, list(place[1].parameters()) if place and frozen else []
        self.largest_norm = optim.clip_norm
        self.parameters = [p for p in method.parameters() if p.requires_grad]
        self.autocast = partial(computing_in, train.precision, device)
        fp16 = autocast_dtype(train.precision, device) == torch.float16
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)
        self.by_view: ByView | None = None
        self.threads = threads or Threads(torch.get_num_threads(), by_view=False)
        torch.set_num_threads(self.threads.each)
        if self.threads.by_view:
            assert isinstance(method, ViewByView)
            self.by_view = ByView(method, self.threads, partial(self.autocast, cache=False))
        # Buffers stay with their process: whose statistics count is the method's business.
        self.parallel: DistributedDataParallel | None = None
        model: nn.Module = method
        if distributed.world_size() > 1:
            model = self.parallel = distributed.data_parallel(method)
        self.model = torch.compile(model) if train.compile else model

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it: the loss scale of fp16."""
        found = self.scaler.state_dict()
        return {f"scaler/{name}": torch.tensor(found[key]) for name, key in SCALER.items() if found}

    def load(self, shared: Mapping[str, Tensor], step: int) -> None:
        """Go on with what the checkpoint of a step has kept."""
        if not self.scaler.is_enabled():
            return
        if missing := [name for name in SCALER if f"scaler/{name}" not in shared]:
            raise UserError(
                f"The checkpoint at step {step} has no loss {missing[0]}, which fp16 needs. Use the "
                "precision that it was written with."
            )
        found = {key: shared[f"scaler/{name}"].item() for name, key in SCALER.items()}
        self.scaler.load_state_dict({**self.scaler.state_dict(), **found})

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
        output: Output
        for i in range(count):
            if self.by_view is not None:
                views, labels = inputs(i)
                output = self.by_view(views, labels, count)
            else:
                last = i == count - 1
                with self.parallel.no_sync() if self.parallel and not last else nullcontext():
                    with self.autocast():
                        output = self.model(*inputs(i))
                    self.scaler.scale(output.loss / count).backward()
            self.method.keep(output)
            loss += output.loss.detach() / count
        if k < self.frozen:  # without gradients an optimizer passes them by, and keeps no state of them
            for parameter in self.held:
                parameter.grad = None
        if self.by_view is not None and not self.by_view.safe:
            # All cores for one call, from the next step on; a resumed run begins like that.
            self.by_view, self.threads = None, Threads(self.threads.each * self.threads.lanes, by_view=False)
            torch.set_num_threads(self.threads.each)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        if self.largest_norm is None:  # clipping to infinity would multiply all gradients by 1
            norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        else:
            norm = clip_grad_norm_(self.parameters, self.largest_norm)
        # In fp16 a gradient may overflow: the scaler leaves that step out and tries a smaller scale.
        stop = check(loss if self.scaler.is_enabled() else loss + norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1:
            raise UserError(
                f"Gradients overflow in fp16 even with a loss scale below 1, in step {k + 1}. Start a new run with "
                "train.precision bf16 or fp32."
            )
        self.optimizer.zero_grad(set_to_none=True)
        watched = self.method.watch(k) if watch else {}
        self.method.after_step(k)
        return Taken(loss, norm, output, watched, stop)
