"""What every process of test_processes.py runs: `torchrun processes_program.py RUNS ...`.

It pretrains every case in the directory of its name below each RUNS, from the checkpoints that it finds there; the
test judges. This is momentum2's own `pretrain` with its loader, checkpoints and log, in fp64: in fp32, training makes
more of the last bit than of a wrong algorithm. A process alone also has the oracle go the first steps of each new run,
on the same views, and saves as oracle.pt what it came to.
"""

import copy
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cases import Case
from oracle import Oracle, norms
from torch import Tensor, nn

from momentum2 import api, backbones
from momentum2.config import Config
from momentum2.methods import Method
from momentum2.training import by_view
from momentum2.training.plan import Plan
from momentum2.weights import Architecture

STEPS, ORACLES = 20, 7
SHALLOW = "shallow"  # two convolutions with batch norm: what devices share does not depend on depth
CASES = [
    replace(case, steps=STEPS, accumulate=accumulate, backbone=SHALLOW)
    for accumulate in (1, 2)
    for case in (
        *(Case("byol", s, t) for s in ("local", "synced") for t in ("synced", "local", "momentum")),
        Case("moco", "local", "shuffle"),
        Case("moco", "local", "momentum", alpha=0.064),
        Case("moco", "local", "ema"),
        Case("simclr", "synced"),
        Case("simsiam", "local"),
        *([Case("byol", "local", alpha=0.5, history="global")] if accumulate == 2 else []),
    )
]


class Watched:
    """The method of the latest `pretrain` as it was built, and the views that it was given, micro-batches apart."""

    start: Method
    views: list[list[Tensor]]


def in_fp64() -> None:
    """Weights, views and losses."""
    torch.set_default_dtype(torch.float64)
    # `.float()` is there to leave bf16; it would round.
    Tensor.float = lambda x: x if x.dtype == torch.float64 else x.to(torch.float32)  # type: ignore[method-assign]
    build = api.build_method

    def build_method(config: Config, plan: Plan, classes: int, *rest: Any) -> Method:
        method = build(config, plan, classes, *rest).double()
        Watched.start, Watched.views = copy.deepcopy(method), []
        method.register_forward_pre_hook(in_double)
        return method

    def in_double(_: nn.Module, inputs: tuple[list[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        Watched.views.append([v.double() for v in inputs[0]])
        return Watched.views[-1], inputs[1]

    api.build_method = build_method
    # One thread for each view computes the same bits (a test of its own), but does not call the method as a whole.
    by_view._suits = lambda *_: False


def with_shallow_networks() -> None:
    def create(architecture: Architecture, *rest: object, **more: object) -> nn.Module:
        assert architecture.backbone == SHALLOW
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )

    backbones._create = create


def ask_oracle(case: Case, out: Path) -> None:
    oracle, a = Oracle(Watched.start, case.settings()), case.accumulate
    losses = []
    for k in range(ORACLES):
        micro_batches = Watched.views[k * a : (k + 1) * a]
        losses.append(oracle.step([torch.cat(of_view) for of_view in zip(*micro_batches, strict=True)]))
    weights = {f"method/{name}": p.detach() for name, p in oracle.parameters()}
    histories = {}
    if case.has_teacher and case.teacher == "momentum":
        for name, norm in norms(oracle.teacher).items():
            histories[f"method/teacher.network.{name}.running_mean"] = norm.means
            histories[f"method/teacher.network.{name}.running_var"] = norm.vars
    torch.save({"losses": losses, "weights": weights, "histories": histories}, out)


def main() -> None:
    in_fp64()
    with_shallow_networks()
    alone = os.environ["WORLD_SIZE"] == "1"
    for runs in map(Path, sys.argv[1:]):
        for case in CASES:
            run = runs / str(case)
            new = not run.exists()
            assert api.pretrain(case.config(), run).finished
            if alone and new:
                ask_oracle(case, run / "oracle.pt")


if __name__ == "__main__":
    main()
