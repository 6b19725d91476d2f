"""One thread for each view: the same bits, whatever the number of threads."""

import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from momentum2.config import Config, MethodConfig, ModelConfig, TrainConfig
from momentum2.methods import BYOL, Method
from momentum2.optim import build_optimizer
from momentum2.training import by_view
from momentum2.training.build import build_method
from momentum2.training.by_view import Threads, choose_threads
from momentum2.training.plan import resolve
from momentum2.training.step import Stepper

CPU = torch.device("cpu")
ONE = TrainConfig(batch_size=8, precision="fp32", devices=1)


class Tiny(nn.Module):
    """Two convolutions with norms, and whatever a test puts between them."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.feature_dim = 8
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), between, nn.Conv2d(4, 8, 3, 2), nn.BatchNorm2d(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


def stepper(
    threads: Threads, method: MethodConfig, between: nn.Module, train: TrainConfig
) -> tuple[Method, Stepper]:
    config = Config(
        method=method, model=ModelConfig(projector_hidden=8, projector_out=4), train=replace(train, steps=9)
    )
    torch.manual_seed(0)
    built = build_method(config, resolve(config, 64), 0, Tiny(between)).train()
    optimizer = build_optimizer(built.named_parameters(), config.optim, 0.1)
    return built, Stepper(built, optimizer, config.train, config.optim, CPU, threads)


def trained(
    threads: Threads,
    method: MethodConfig,
    views: int = 2,
    between: nn.Module | None = None,
    train: TrainConfig = ONE,
) -> tuple[dict[str, Tensor], Threads]:
    """The state after four steps, and the threads that the next one would take."""
    before = torch.get_num_threads()
    try:
        built, take_step = stepper(threads, method, between or nn.ReLU(inplace=True), train)
        draws = torch.Generator().manual_seed(0)
        for k in range(4):
            micro = [
                [
                    torch.randn(8, 3, 16 if v < 2 else 12, 16 if v < 2 else 12, generator=draws)
                    for v in range(views)
                ]
                for _ in range(train.accumulate)
            ]
            taken = take_step(k, 0.1, lambda i, micro=micro: (micro[i], None))
            assert torch.isfinite(taken.loss + taken.norm)
        return built.state_dict(), take_step.threads
    finally:
        torch.set_num_threads(before)


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


CASES = {
    "byol": {"method": MethodConfig()},
    "small crops": {"method": MethodConfig(), "views": 4},
    "micro-batches": {
        "method": MethodConfig(),
        "train": TrainConfig(batch_size=16, precision="fp32", accumulate=2, devices=1),
    },
    "devices": {
        "method": MethodConfig(teacher_norm="local"),
        "train": TrainConfig(batch_size=8, precision="fp32", devices=2),
    },
    "student": {"method": MethodConfig(student_norm="momentum")},
    "ema": {"method": MethodConfig(teacher_norm="ema")},
    "moco": {"method": MethodConfig("moco", queue_size=32, teacher_norm="shuffle")},
    "simsiam": {"method": MethodConfig("simsiam")},
    "simclr": {"method": MethodConfig("simclr"), "views": 4},
    "dino": {"method": MethodConfig("dino", projector_norm=True), "views": 3},
    "bf16": {"method": MethodConfig(), "train": TrainConfig(batch_size=8, precision="bf16", devices=1)},
}


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_threads_changes_no_bit(case: str):
    options: dict[str, Any] = CASES[case]
    alone, _ = trained(Threads(1, True, 1), **options)
    together, threads = trained(Threads(1, True, 3), **options)
    assert threads == Threads(1, True, 3)
    assert_equal(alone, together)
    if case not in (
        "bf16",
        "dino",
    ):  # autocast shares a cast of the weights, and DINO divides them by their norm
        assert_equal(alone, trained(Threads(1, False), **options)[0])


@pytest.mark.parametrize("ordered", [True, False])
def test_statistics_are_not_raced_for(ordered: bool, monkeypatch: pytest.MonkeyPatch):
    """View 1 is held up until view 2 has begun; without the turns, until it has ended, and then the bits change."""
    alone, _ = trained(Threads(1, True, 1), MethodConfig())
    encode, calls, go = BYOL.encode, itertools.count(), threading.Event()

    def held(self: BYOL, i: int, view: Tensor) -> tuple[Tensor, ...]:
        if next(calls) < 2:  # the first step is taken in one thread
            return encode(self, i, view)
        if i == 0:
            assert go.wait(600)
            go.clear()
            return encode(self, i, view)
        if ordered:
            go.set()
            return encode(self, i, view)
        result = encode(self, i, view)
        go.set()
        return result

    monkeypatch.setattr(BYOL, "encode", held)
    if not ordered:
        monkeypatch.setattr(by_view._Turns, "before", lambda *_: None)
    together, _ = trained(Threads(1, True, 2), MethodConfig())
    assert all(torch.equal(alone[name], together[name]) for name in alone) == ordered


class Twice(nn.Module):
    """One norm, called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x))


class Foreign(nn.Module):
    """Changes a buffer that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Module()
        self.kept.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.seen.add_(x.detach().mean())
        return x


@pytest.mark.parametrize("between", [nn.Dropout(0.5), Twice(), Foreign()], ids=lambda m: type(m).__name__)
def test_what_is_more_than_statistics_is_left_in_one_call(between: nn.Module):
    _, threads = trained(Threads(1, True, 2), MethodConfig(), between=between)
    assert threads == Threads(2, False)  # all cores for one call, which a checkpoint keeps


def test_an_error_in_a_thread_is_the_steps(monkeypatch: pytest.MonkeyPatch):
    encode = BYOL.encode

    def failing(self: BYOL, i: int, view: Tensor) -> tuple[Tensor, ...]:
        if i == fails:
            raise ValueError("no")
        return encode(self, i, view)

    monkeypatch.setattr(BYOL, "encode", failing)
    for view in (0, 1):
        fails = -1
        _, take_step = stepper(Threads(1, True, 2), MethodConfig(), nn.ReLU(), ONE)
        views = [torch.randn(8, 3, 16, 16) for _ in range(2)]
        take_step(0, 0.1, lambda i: (views, None))  # noqa: B023
        fails = view
        with pytest.raises(ValueError, match="no"):
            take_step(1, 0.1, lambda i: (views, None))  # noqa: B023


def test_an_error_ends_the_step_where_there_are_more_views_than_threads(monkeypatch: pytest.MonkeyPatch):
    """Lane 0 has views 0 and 2, lane 1 views 1 and 3: if view 0 fails, view 3 must not wait for view 2."""
    encode, fails = BYOL.encode, False

    def failing(self: BYOL, i: int, view: Tensor) -> tuple[Tensor, ...]:
        if fails and i == 0:
            raise ValueError("no")
        return encode(self, i, view)

    monkeypatch.setattr(BYOL, "encode", failing)
    _, take_step = stepper(Threads(1, True, 2), MethodConfig(), nn.ReLU(), ONE)
    views = [torch.randn(8, 3, 16, 16) for _ in range(4)]
    take_step(0, 0.1, lambda i: (views, None))
    fails = True
    with pytest.raises(ValueError, match="no"):
        take_step(1, 0.1, lambda i: (views, None))


class Own(BYOL):
    def forward(self, views: list[Tensor], labels: Tensor | None) -> Any:
        return super().forward(views, labels)


@pytest.mark.parametrize(
    ("kind", "train", "before", "found"),
    [
        (BYOL, {}, None, Threads(1, True, 4)),  # one core is free, four may be used
        (BYOL, {"threads": 6}, None, Threads(3, True, 2)),
        (BYOL, {"threads": 1}, None, Threads(1, True, 1)),
        (BYOL, {"compile": True}, None, Threads(1, False, 4)),
        (Own, {}, None, Threads(1, False, 4)),  # its own forward is asked
        (BYOL, {}, {"threads": 2}, Threads(2, False, 2)),  # begun by a version without it
        (BYOL, {}, {"threads": 1, "by_view": True}, Threads(1, True, 4)),
        (BYOL, {}, {"threads": 2, "by_view": True}, Threads(2, True, 2)),
        (BYOL, {}, {"threads": 8, "by_view": True}, Threads(8, True, 1)),  # on a smaller machine
    ],
)
def test_which_threads_a_run_takes(
    kind: type[BYOL], train: dict[str, Any], before: Any, found: Threads, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(by_view, "cpu_threads", lambda: 1)
    monkeypatch.setattr(by_view, "allowed_cores", lambda: 4)
    method = object.__new__(kind)
    assert choose_threads(method, TrainConfig(**train), CPU, before) == found
    assert not choose_threads(method, TrainConfig(**train), torch.device("cuda"), before).by_view
