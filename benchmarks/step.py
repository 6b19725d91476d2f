"""Images per second of a whole training step, against peers and against the limit.

    python benchmarks/step.py --cases r18-32 --repeats 9

One process, interleaved: each repeat times one step of every candidate in turn, so that a busy machine slows all
of them alike; the table gives medians and ratios. A step takes two views of a batch (to loss, backward,
optimizer, teacher), with the augmentation left out because `benchmarks/augment.py` measures that; peak memory is that
of a process with one candidate alone. The candidates:

    momentum2   our method as `pretrain` runs it with this number of threads (channels_last; --precision bf16 for bf16)
    lightly     lightly's BYOL building blocks wired as in its documented example: fp32, NCHW, its heads and loss
    authors     the paper's method in plain fp32 NCHW with Momentum BN operation by operation, as in the released code
    limit       only the convolutions and matrix products of our step, forward and backward, one by one

`limit / momentum2` is the share of the step that no framework could save. `lightly` comes with the `benchmark` extra.
"""

import argparse
import copy
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from norms import AuthorsFormula
from torch import Tensor, nn

from momentum2 import backbones
from momentum2.config import Config, ModelConfig, Precision, TrainConfig
from momentum2.optim import build_optimizer
from momentum2.training.build import build_method
from momentum2.training.by_view import choose_threads
from momentum2.training.device import autocast_dtype, keep_large_blocks
from momentum2.training.plan import resolve
from momentum2.training.step import Stepper

Step = Callable[[], None]

CASES = {
    "r18-96": (ModelConfig("resnet18", "imagenet", projector_hidden=512, projector_out=128), 96, 32),
    "r18-32": (ModelConfig("resnet18", "cifar", projector_hidden=512, projector_out=128), 32, 128),
    "r50-224": (ModelConfig("resnet50", "imagenet"), 224, 8),
}


def ours(model: ModelConfig, views: list[Tensor], bf16: bool) -> tuple[Step, nn.Module]:
    precision: Precision = "bf16" if bf16 else "fp32"
    config = Config(
        model=model,
        train=TrainConfig(batch_size=len(views[0]), precision=precision, threads=torch.get_num_threads()),
    )
    plan = resolve(replace(config, train=replace(config.train, steps=1000)), 10_000)
    method = build_method(config, plan, 0).to(memory_format=torch.channels_last).train()
    optimizer = build_optimizer(method.named_parameters(), config.optim, 0.05)
    cpu = torch.device("cpu")
    threads = choose_threads(method, config.train, cpu, None)
    take_step = Stepper(method, optimizer, config.train, config.optim, cpu, threads)
    views = [v.to(memory_format=torch.channels_last) for v in views]

    def step() -> None:
        take_step(0, 0.05, lambda i: (views, None))

    return step, method


def lightly(model: ModelConfig, views: list[Tensor]) -> Step | None:
    try:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
        from lightly.models.utils import deactivate_requires_grad, update_momentum
    except ImportError:
        return None
    hidden, d = model.projector_hidden, model.projector_out
    backbone = backbones.build(model.backbone, model.stem, model.width)
    projector = BYOLProjectionHead(backbone.feature_dim, hidden, d)
    predictor = BYOLPredictionHead(d, hidden, d)
    teacher, teacher_projector = copy.deepcopy(backbone), copy.deepcopy(projector)
    deactivate_requires_grad(teacher)
    deactivate_requires_grad(teacher_projector)
    criterion = NegativeCosineSimilarity()
    trained = nn.ModuleList([backbone, projector, predictor])
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.06)

    def step() -> None:
        update_momentum(backbone, teacher, m=0.99)
        update_momentum(projector, teacher_projector, m=0.99)
        p0, p1 = (predictor(projector(backbone(v))) for v in views)
        with torch.no_grad():
            z0, z1 = (teacher_projector(teacher(v)) for v in views)
        loss = 0.5 * (criterion(p0, z1) + criterion(p1, z0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def authors(model: ModelConfig, views: list[Tensor]) -> Step:
    config = Config(model=model, train=TrainConfig(batch_size=len(views[0]), steps=1000))
    config = replace(config, method=replace(config.method, teacher_norm="local"))
    method = build_method(config, resolve(config, 10_000), 0).train()
    for parent in list(method.teacher.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
                setattr(parent, name, AuthorsFormula(child.num_features).requires_grad_(False))
    optimizer = torch.optim.SGD(
        [p for p in method.parameters() if p.requires_grad], lr=0.05, momentum=0.9, foreach=False
    )

    def step() -> None:
        method(views, None).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for s, t in zip(method.student.parameters(), method.teacher.parameters(), strict=True):
                t.data = t.data * 0.99 + s.data * 0.01

    return step


def limit(method: nn.Module, views: list[Tensor], bf16: bool) -> Step:
    """The convolutions and matrix products of one step, each with inputs of its shapes."""
    calls: list[tuple[nn.Module, Tensor, bool]] = []

    def record(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        calls.append((module, inputs[0].detach(), torch.is_grad_enabled()))

    layers = [m for m in method.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(record) for layer in layers]
    views = [v.to(memory_format=torch.channels_last) for v in views]
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        method(views, None)
    for hook in hooks:
        hook.remove()
    first = calls[0][1].shape[1]  # the images need no gradient
    dtype = torch.bfloat16 if bf16 else torch.float32
    ready = []
    for module, x, backward in calls:
        x = x.to(dtype)
        weight = module.weight.detach().to(dtype).requires_grad_(backward)
        x = x.requires_grad_(backward and x.shape[1] != first)
        convolve = isinstance(module, nn.Conv2d)
        y = F.conv2d(x, weight, None, module.stride, module.padding) if convolve else F.linear(x, weight)
        ready.append((module, x, weight, torch.ones_like(y).detach(), backward))

    def step() -> None:
        for module, x, weight, gradient, backward in ready:
            if isinstance(module, nn.Conv2d):
                y = F.conv2d(x, weight, None, module.stride, module.padding)
            else:
                y = F.linear(x, weight)
            if backward:
                torch.autograd.grad(y, [t for t in (x, weight) if t.requires_grad], gradient)

    return step


def candidates(case: str, bf16: bool, only: str | None = None) -> dict[str, Step]:
    """The candidates of a case by name, or one of them alone."""
    model, size, batch = CASES[case]
    torch.manual_seed(0)
    views = [torch.randn(batch, 3, size, size) for _ in range(2)]
    found: dict[str, Step | None] = {}
    if only in (None, "momentum2", "limit"):
        step, method = ours(model, views, bf16)
        found["momentum2"] = step
    if only in (None, "lightly"):
        found["lightly"] = lightly(model, views)
    if only in (None, "authors"):
        found["authors"] = authors(model, views)
    if only in (None, "limit"):
        found["limit"] = limit(method, views, bf16)
    return {name: step for name, step in found.items() if step and only in (None, name)}


def peak_gb(case: str, candidate: str, precision: str) -> float:
    """Peak memory of a process that takes two steps of one candidate."""
    words = [sys.executable, __file__, "--cases", case, "--peak-of", candidate, "--precision", precision]
    return float(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="auto", choices=["auto", "fp32", "bf16"])
    parser.add_argument("--clock", default="wall", choices=["wall", "cpu"], help="cpu: on a busy machine")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_large_blocks()
    torch.set_num_threads(options.threads)
    bf16 = autocast_dtype(options.precision, torch.device("cpu")) is not None
    if options.peak_of:
        (step,) = candidates(options.cases[0], bf16, options.peak_of).values()
        step()
        step()
        # Not ru_maxrss, in which a process begins with the peak of the one that started it.
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        print(int(peak) / 1e6)
        return
    now = time.process_time if options.clock == "cpu" else time.perf_counter
    print(f"{options.threads} thread(s), momentum2 in {'bf16' if bf16 else 'fp32'}, {options.clock} time")
    for case in options.cases:
        model, size, batch = CASES[case]
        present = candidates(case, bf16)
        seconds: dict[str, list[float]] = {n: [] for n in present}
        for repeat in range(options.repeats + 1):
            for name, run in present.items():
                start = now()
                run()
                if repeat:  # the first is for warming up
                    seconds[name].append(now() - start)
        names = list(present)
        del present, run
        print(f"\n{case}: {model.backbone}, {model.stem} stem, {size} px, batch {batch}")
        for name in names:
            value = median(seconds[name])
            ratio = median(a / b for a, b in zip(seconds[name], seconds["momentum2"], strict=True))
            print(f"  {name:<10}{batch / value:8.1f} images/s {ratio:6.2f} × momentum2's time", flush=True)
        for name in names[:-1]:
            print(f"  {name:<10}{peak_gb(case, name, options.precision):8.2f} GB peak", flush=True)
        if "lightly" not in names:
            print("  lightly is not installed: pip install 'momentum2[benchmark]'")


if __name__ == "__main__":
    main()
