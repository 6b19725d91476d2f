"""Forward and backward on a CPU, one thread for each view.

Threads inside an operation wait for each other at its end, hundreds of times in a step: beside other work a step takes
many times as long. The views of a batch are independent until the loss. So each has its thread, networks and all; what
comes out meets without its graph at the loss; and each view's backward is its thread's again.

The number of threads changes no bit: gradients are added in the order in which autograd adds them, and whatever keeps
statistics in its forward sees the views in their order, view 2 right behind view 1.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.config import TrainConfig
from momentum2.distributed.together import broadcast_bytes
from momentum2.machine import allowed_cores, cpu_threads
from momentum2.methods import Method, Output, ViewByView

T = TypeVar("T")


class Threads(NamedTuple):
    """The CPU threads of a process."""

    each: int  # inside an operation
    by_view: bool  # whether views are worked on one by one
    lanes: int = 1  # how many of them at a time

    def decide(self) -> dict[str, int | bool]:
        """What decides the order of sums, so that a resumed run keeps it."""
        return {"threads": self.each, "by_view": self.by_view}


def choose_threads(
    method: Method, train: TrainConfig, device: torch.device, before: dict[str, Any] | None
) -> Threads:
    """How to use the cores. `before` is what a resumed run keeps; earlier versions had no `by_view`."""
    by_view = _suits(method, train, device) and (before is None or bool(before.get("by_view", False)))
    if before is not None and not train.threads:
        each = int(before["threads"])
    else:
        total = train.threads or int(broadcast_bytes(b"%d" % cpu_threads()))
        each = max(1, total // 2) if by_view else total
    # However busy the cores are now: where a thread must wait for its core, the others do not.
    return Threads(each, by_view, max(1, (train.threads or allowed_cores()) // each))


def _suits(method: Method, train: TrainConfig, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and isinstance(method, ViewByView)
        and type(method).forward is ViewByView.forward
        and distributed.world_size() == 1
        and not train.compile
        and train.precision != "fp16"  # one loss to scale
    )


class ByView:
    """Forward and backward of one micro-batch.

    The first call takes one thread and finds out whether the next ones may take more; if not, `safe` is False.

    Args:
        method: In training mode.
        threads: At most `lanes` views at a time.
        autocast: A new context of the precision to compute in. Without a cache: autocast's would be all threads'.
    """

    def __init__(
        self, method: ViewByView, threads: Threads, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.method, self.lanes, self.autocast, self.safe = method, threads.lanes, autocast, True
        self.parameters = [p for p in method.parameters() if p.requires_grad]
        self.ordered: list[nn.Module] | None = None  # what keeps statistics; None before the first step
        self.pool = ThreadPoolExecutor(
            max(1, self.lanes - 1), "momentum2-view", torch.set_num_threads, (threads.each,)
        )

    def __call__(self, views: list[Tensor], labels: Tensor | None, share: float) -> Output:
        """The output for the views; adds the gradient of its loss / share to that of the parameters."""
        if self.ordered is None:
            survey = _Survey(self.method)
            output = self._step(views, labels, share, survey, 1)
            self.ordered, self.safe = survey.ordered, survey.is_safe()
            return output
        lanes = min(self.lanes, len(views)) if self.safe else 1
        return self._step(views, labels, share, _Turns(self.ordered if lanes > 1 else []), lanes)

    def _step(
        self, views: list[Tensor], labels: Tensor | None, share: float, turns: "_Turns", lanes: int
    ) -> Output:
        def encode(i: int) -> tuple[Tensor, ...]:
            with self.autocast(), turns.of(i):
                return self.method.encode(i, views[i])

        with turns.kept():
            encoded = self._each(encode, len(views), lanes)
        met = [tuple(t.detach().requires_grad_(t.requires_grad) for t in each) for each in encoded]
        with self.autocast():
            output = self.method.meet(met, labels)
        (output.loss / share).backward()

        def backward(i: int) -> tuple[Tensor | None, ...]:
            pairs = [(t, m.grad) for t, m in zip(encoded[i], met[i], strict=True) if m.grad is not None]
            if not pairs:
                return (None,) * len(self.parameters)
            outputs, gradients = zip(*pairs, strict=True)
            return torch.autograd.grad(outputs, self.parameters, gradients, allow_unused=True)

        self._add(self._each(backward, len(views), lanes))
        return output

    @torch.no_grad()
    def _add(self, gradients: list[tuple[Tensor | None, ...]]) -> None:
        """Add the views' gradients to the parameters', last view first, as autograd does."""
        for parameter, of_views in zip(self.parameters, zip(*gradients, strict=True), strict=True):
            found = [g for g in reversed(of_views) if g is not None]
            if not found:
                continue
            total = found[0]
            for g in found[1:]:
                total = total.add_(g)
            if parameter.grad is not None:
                parameter.grad.add_(total)
            elif total.stride() == parameter.stride():
                parameter.grad = total
            else:  # in the parameter's memory layout, as autograd has it: sums keep their order
                parameter.grad = torch.empty_like(parameter).copy_(total)

    def _each(self, work: Callable[[int], T], count: int, lanes: int) -> list[T]:
        """`work` of every view; lane l of this many takes the views l, l + lanes, ..., this thread lane 0."""

        def lane(first: int) -> list[T]:
            return [work(i) for i in range(first, count, lanes)]

        others = [self.pool.submit(lane, first) for first in range(1, lanes)]
        try:
            done = [lane(0)]
        finally:
            wait(others)
        done += [other.result() for other in others]
        return [done[i % lanes][i // lanes] for i in range(count)]


class _Turns:
    """While `kept`, the given modules are called for view i only after they were for all views before it."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules, self.view = modules, threading.local()
        self.passed: dict[nn.Module, set[int]] = {module: set() for module in modules}
        self.ended: set[int] = set()
        self.failed = False
        self.changed, self.waiting = threading.Condition(), 0

    @contextmanager
    def of(self, view: int) -> Iterator[None]:
        """In this thread it is the turn of `view`; its end lets the others continue."""
        self.view.number = view
        try:
            yield
        except BaseException:
            self.failed = True  # the later views of this lane will never come, and nobody may wait for them
            raise
        finally:
            self.ended.add(view)
            self._tell()

    @contextmanager
    def kept(self) -> Iterator[None]:
        hooks = [m.register_forward_pre_hook(self.before) for m in self.modules]
        hooks += [m.register_forward_hook(self.after) for m in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def before(self, module: nn.Module, inputs: object) -> None:
        earlier, passed = range(self.view.number), self.passed[module]

        def is_our_turn() -> bool:
            return self.failed or all(i in passed or i in self.ended for i in earlier)

        if is_our_turn():  # most often, and then there is no need for the lock
            return
        with self.changed:
            self.waiting += 1
            self.changed.wait_for(is_our_turn)
            self.waiting -= 1

    def after(self, module: nn.Module, inputs: object, output: object) -> None:
        self.passed[module].add(self.view.number)
        self._tell()

    def _tell(self) -> None:
        """Wake the waiting threads. A thread that starts to wait after this check has already seen the change."""
        if self.waiting:
            with self.changed:
                self.changed.notify_all()


class _Survey(_Turns):
    """Watches a step in one thread: finds what keeps statistics, and whether threads may take the next steps.

    They may not where a network draws random numbers, changes what is not the called module's own, changes something
    twice in a view, or in its backward: there is more to it than the order of the views.
    """

    def __init__(self, method: nn.Module) -> None:
        super().__init__([module for module in method.modules() if module._buffers])
        self.method, self.random = method, torch.get_rng_state()
        self.states = [_State(method)]
        self.begun: dict[nn.Module, _State] = {}
        self.changes: Counter[tuple[nn.Module, int]] = Counter()

    @contextmanager
    def kept(self) -> Iterator[None]:
        with super().kept():
            yield
        self.states.append(_State(self.method))

    def before(self, module: nn.Module, inputs: object) -> None:
        self.begun[module] = _State(module, recurse=False)

    def after(self, module: nn.Module, inputs: object, output: object) -> None:
        if self.begun[module].changes(_State(module, recurse=False)):
            self.changes[module, self.view.number] += 1

    @property
    def ordered(self) -> list[nn.Module]:
        """What keeps statistics."""
        return list({module: None for module, _ in self.changes})

    def is_safe(self) -> bool:
        """Asked after the backward."""
        start, encoded = self.states
        own = {id(buffer) for module in self.ordered for buffer in module.buffers(recurse=False)}
        return (
            torch.equal(self.random, torch.get_rng_state())
            and {id(tensor) for tensor in start.changes(encoded)} <= own
            and max(self.changes.values(), default=0) <= 1
            and not encoded.changes(_State(self.method))
        )


class _State:
    """The parameters and buffers of a module, and how often each was written to."""

    def __init__(self, module: nn.Module, recurse: bool = True) -> None:
        named = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
        self.tensors = {name: (tensor, tensor._version) for name, tensor in named}

    def changes(self, later: "_State") -> list[Tensor]:
        """Those of `later` that were written to or replaced."""
        return [
            tensor
            for name, (tensor, version) in later.tensors.items()
            if name not in self.tensors
            or self.tensors[name][0] is not tensor
            or self.tensors[name][1] != version
        ]
