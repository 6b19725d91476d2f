"""Every method is one graph for torch.compile, whatever the step and the micro-batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from momentum2.config import Config, MethodConfig, ModelConfig, TrainConfig
from momentum2.optim import build_optimizer
from momentum2.training.build import build_method
from momentum2.training.plan import resolve
from momentum2.training.step import Stepper


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feature_dim = 4
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


CASES: dict[str, tuple[MethodConfig, int]] = {
    "byol": (MethodConfig(), 3),
    "momentum student": (MethodConfig(student_norm="momentum", teacher_norm="local"), 2),
    "ema": (MethodConfig(teacher_norm="ema"), 2),
    "moco": (MethodConfig("moco", queue_size=32), 2),
    "shuffle": (MethodConfig("moco", queue_size=32, teacher_norm="shuffle"), 2),
    "simsiam": (MethodConfig("simsiam"), 2),
    "simclr": (MethodConfig("simclr"), 2),
    "dino": (MethodConfig("dino", teacher_temperature_start=0.02, teacher_temperature_warmup=0.5), 3),
}


def graphs(method: MethodConfig, views: int, sizes: list[int]) -> int:
    """How many graphs four steps of two micro-batches and two devices make; a break would be an error."""
    torch._dynamo.reset()
    counters.clear()
    train = TrainConfig(batch_size=16, precision="fp32", accumulate=2, devices=2, steps=9)
    config = Config(method, ModelConfig(projector_hidden=4, projector_out=4), train=train)
    built = build_method(config, resolve(config, 64), 0, Tiny()).train()
    optimizer = build_optimizer(built.named_parameters(), config.optim, 0.1)
    take_step = Stepper(built, optimizer, train, config.optim, torch.device("cpu"))
    take_step.model = torch.compile(built, fullgraph=True, backend="eager")
    for k, size in enumerate(sizes):
        batch: Any = ([torch.randn(8, 3, size, size) for _ in range(views)], None)
        take_step(k, 0.1, lambda i, batch=batch: batch)
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("case", CASES)
def test_a_method_is_one_graph(case: str):
    assert graphs(*CASES[case], [8, 8, 8, 8]) == 1


def test_the_count_sees_what_is_compiled_again():
    assert graphs(*CASES["simsiam"], [8, 8, 10, 10]) == 2
