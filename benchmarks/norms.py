"""What the norms cost: ratios, measured in turns within one process.

    python benchmarks/norms.py
    python benchmarks/norms.py --backbone resnet50 --repeats 25 --device cuda

Teacher: one forward without gradient, batch 32 at 96 px, channels_last, training mode.
Teacher on 16 devices: the same, batch 128 at 32 px (small stem), 8 samples a device; ratios to local batch norm.
Student: forward and backward, batch 128 at 32 px (small stem), 16 devices of 8 samples.
--norms-alone leaves everything but the norms out: each runs on the input that it has in the network.
Each figure is the median over the repeats of time / the first line's time in the same repeat.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2 import convert_norms
from momentum2._torchvision import torchvision
from momentum2.config import NormName
from momentum2.norms import momentum_norms
from momentum2.training.device import keep_large_blocks

DEVICES = 16


class AuthorsFormula(nn.BatchNorm2d):
    """Momentum BN operation by operation, as the authors' released code computes it, for N×C and N×C×H×W."""

    alpha = 0.5

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        others, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
        mean, var = x.mean(others), x.var(others)
        n = x.numel() / x.size(1)
        mean = self.alpha * mean + (1 - self.alpha) * self.running_mean
        var = self.alpha * var * n / (n - 1) + (1 - self.alpha) * self.running_var
        x = (x - mean.view(shape)) / torch.sqrt(var.view(shape) + self.eps)
        return x * self.weight.view(shape) + self.bias.view(shape)


class LoopOverDevices(nn.BatchNorm2d):
    """Devices as one call of torch's batch norm each."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [F.batch_norm(part, None, None, self.weight, self.bias, True) for part in x.chunk(DEVICES)]
        return torch.cat(parts)


def with_class(net: nn.Module, norm: type[nn.BatchNorm2d]) -> nn.Module:
    net = copy.deepcopy(net)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = norm
    return net


def converted(net: nn.Module, kind: NormName, devices: int = 1) -> nn.Module:
    net = copy.deepcopy(net)
    convert_norms(net, kind, devices)
    for norm in momentum_norms(net):
        norm.alpha = 0.5
    return net


def small_stem(net: nn.Module) -> nn.Module:
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.Identity()
    return net


def ratios(
    runs: dict[str, Callable[[], object]], repeats: int, now: Callable[[], float]
) -> dict[str, tuple[float, float]]:
    """name -> (median seconds, median ratio to the first), all runs in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start = now()
            run()
            if repeat >= 2:  # the first two warm up
                seconds[name].append(now() - start)
    first = next(iter(seconds.values()))
    return {
        name: (statistics.median(s), statistics.median(a / b for a, b in zip(s, first, strict=True)))
        for name, s in seconds.items()
    }


def inputs_of_norms(net: nn.Module, x: Tensor) -> list[Tensor]:
    """What each norm of `net` is given for the batch x, in the order of the network's modules."""
    seen: dict[nn.Module, Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]}))
        for m in net.modules()
        if isinstance(m, _BatchNorm)
    ]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    return [seen[m] for m in net.modules() if m in seen]


def forward_of(
    net: nn.Module, x: Tensor, args: argparse.Namespace, dtype: torch.dtype
) -> Callable[[], list[Tensor]]:
    """The outputs of the network or, with --norms-alone, of each of its norms on recorded inputs."""
    net = net.to(args.device, memory_format=torch.channels_last).train()
    if args.norms_alone:
        norms = [m for m in net.modules() if isinstance(m, _BatchNorm)]
        inputs = [i.to(dtype).requires_grad_() for i in inputs_of_norms(net, x)]
        return lambda: [norm(i) for norm, i in zip(norms, inputs, strict=True)]

    def run() -> list[Tensor]:
        with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
            return [net(x)]

    return run


def teacher_runs(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    net = torchvision.models.get_model(args.backbone, weights=None)
    nets = {
        "plain BN": net,
        "Momentum BN": converted(net, "momentum"),
        "the authors' formula": with_class(net, AuthorsFormula),
    }
    x = torch.randn(32, 3, 96, 96, device=args.device).contiguous(memory_format=torch.channels_last)
    return {name: torch.no_grad()(forward_of(net, x, args, dtype)) for name, net in nets.items()}


def student_runs(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    net = small_stem(torchvision.models.get_model(args.backbone, weights=None))
    nets = {
        "plain BN": net,
        f"local BN, {DEVICES} devices": converted(net, "local", DEVICES),
        f"a loop over {DEVICES} devices": with_class(net, LoopOverDevices),
    }
    x = torch.randn(128, 3, 32, 32, device=args.device).contiguous(memory_format=torch.channels_last)

    def step(forward: Callable[[], list[Tensor]]) -> None:
        outputs = forward()
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])

    return {name: partial(step, forward_of(net, x, args, dtype)) for name, net in nets.items()}


def devices_runs(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    net = small_stem(torchvision.models.get_model(args.backbone, weights=None))
    nets = {
        f"local BN, {DEVICES} devices": converted(net, "local", DEVICES),
        f"Momentum BN, {DEVICES} devices": converted(net, "momentum", DEVICES),
        "plain BN": net,
        f"a loop over {DEVICES} devices": with_class(net, LoopOverDevices),
    }
    x = torch.randn(128, 3, 32, 32, device=args.device).contiguous(memory_format=torch.channels_last)
    return {name: torch.no_grad()(forward_of(net, x, args, dtype)) for name, net in nets.items()}


CASES = {
    "teacher": ("teacher forward", teacher_runs),
    "devices": (f"teacher forward on {DEVICES} devices", devices_runs),
    "student": ("student step", student_runs),
}


def clock(args: argparse.Namespace) -> Callable[[], float]:
    tick = time.process_time if args.clock == "cpu" else time.perf_counter

    def now() -> float:
        if args.device == "cuda":
            torch.cuda.synchronize()
        return tick()

    return now


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="resnet18", help="a ResNet of torchvision")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "cpu"],
        help="cpu: this process's own time, on a busy machine",
    )
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="default: both")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--norms-alone", action="store_true", help="leave out all but the norms")
    args = parser.parse_args()
    keep_large_blocks()  # as training does
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    print(
        f"{args.backbone}, {args.device}, {args.threads} thread(s), {args.clock}, torch {torch.__version__}"
    )
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for case in args.cases:
        title, runs = CASES[case]
        for precision in [args.precision] if args.precision else dtypes:
            print(f"\n{title}, {precision}{', norms alone' if args.norms_alone else ''}")
            for name, (seconds, ratio) in ratios(
                runs(args, dtypes[precision]), args.repeats, clock(args)
            ).items():
                print(f"  {name:<28}{1000 * seconds:9.1f} ms {ratio:8.3f}×", flush=True)


if __name__ == "__main__":
    main()
