"""Check on a real GPU what was only counted on a fake one, and print a table to paste into an issue.

    python benchmarks/first_gpu.py [--backbone resnet50] [--size 224] [--images 32]
    torchrun --standalone --nproc-per-node 2 benchmarks/first_gpu.py        # where there are two

It takes a few minutes and writes to a temporary folder alone:

    waits        ten steps of the real loop in which torch raises an error wherever the host waits for the device
    kernels      launched in a step, by torch.profiler, and images per second
    norms        our norms by torch's kernels against the formulas that CPUs use, on random inputs
    kill         a run with train.deterministic that is killed and resumed ends with the same bits (one process)
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from momentum2 import LocalBatchNorm, MomentumBatchNorm, SyncedBatchNorm, distributed
from momentum2.api import pretrain
from momentum2.config import Config, DataConfig, MethodConfig, ModelConfig, MonitorConfig, TrainConfig
from momentum2.distributed.together import broadcast_bytes, joined
from momentum2.methods import Method
from momentum2.norms import _functional
from momentum2.training.device import choose_device

WARM_UP, STEPS = 5, 10
TABLE: list[tuple[str, str]] = []


def say(what: str, value: str) -> None:
    TABLE.append((what, value))
    if distributed.is_main():
        print(f"{what}: {value}", flush=True)


def settings(options: argparse.Namespace, steps: int) -> Config:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    batch = options.images * world
    return Config(
        method=MethodConfig(),
        model=ModelConfig(options.backbone),
        data=DataConfig("shapes", image_size=options.size, train_size=max(4 * batch, 256)),
        train=TrainConfig(steps=steps, batch_size=batch, device="cuda", checkpoint_every=10**9),
        monitor=MonitorConfig(log_every=10**6, report=False),
    )


@contextmanager
def watched(begin: Callable[[int], None]) -> Iterator[None]:
    """Calls `begin` at the beginning of each step."""
    original = Method.before_step

    def before_step(self: Method, k: int) -> None:
        begin(k)
        original(self, k)

    with patch.object(Method, "before_step", before_step):
        yield


def waits(options: argparse.Namespace, folder: Path) -> None:
    """The last step is logged and saved, and so may wait."""
    steps = WARM_UP + STEPS + 1

    def begin(k: int) -> None:
        mode = "error" if WARM_UP <= k < WARM_UP + STEPS else "default"
        torch.cuda.set_sync_debug_mode(mode)

    try:
        with watched(begin):
            pretrain(settings(options, steps), folder / "waits")
        say("waits", f"none in {STEPS} steps")
    except RuntimeError as error:
        say("waits", f"FAILED: {str(error).splitlines()[0]}")
        if distributed.world_size() == 1:
            import traceback

            traceback.print_exc()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels(options: argparse.Namespace, folder: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    profiler = torch.profiler.profile(activities=activities)
    start = 0.0

    def begin(k: int) -> None:
        nonlocal start
        if k == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        if k == WARM_UP + STEPS:
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - start) / STEPS
            images = settings(options, 1).train.batch_size
            say("step", f"{1000 * seconds:.1f} ms, {images / seconds:.0f} images/s")
            profiler.start()
        if k == WARM_UP + STEPS + 1:
            torch.cuda.synchronize()
            profiler.stop()

    with watched(begin):
        pretrain(settings(options, WARM_UP + STEPS + 3), folder / "kernels")
    launched = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(event.device_time for event in launched) / 1000
    say("kernels", f"{len(launched)} in a step, {busy:.1f} ms of the device")


def norms() -> None:
    """Output, gradient and running statistics, each way; the formulas of CPUs run on the GPU too."""
    torch.manual_seed(distributed.rank())
    x, g = torch.randn(2, 32, 64, 14, 14, device="cuda").unbind()
    g = g.to(memory_format=torch.channels_last)
    made: dict[str, torch.nn.Module] = {
        "local, 8 devices": LocalBatchNorm(64, devices=8),
        "momentum": MomentumBatchNorm(64),
        "momentum, 8 devices": MomentumBatchNorm(64, devices=8),
        "synced": SyncedBatchNorm(64),
    }

    def results(norm: torch.nn.Module, other: bool) -> list[Tensor]:
        ours = copy.deepcopy(norm).cuda().train()
        data = x.to(memory_format=torch.channels_last).requires_grad_()
        # With no devices few enough, and a weight that is no number's, the formulas are those of CPUs.
        with patch.object(_functional, "FEW_DEVICES", 0 if other else _functional.FEW_DEVICES):
            if other and isinstance(ours, SyncedBatchNorm):
                with patch("momentum2.norms.synced._OnCuda.apply", lambda t, *_: formulas(ours, t)):
                    y = ours(data)
            else:
                y = ours(data)
        y.backward(g)
        statistics = [] if isinstance(ours, MomentumBatchNorm) else [ours.running_mean, ours.running_var]
        return [y.detach(), data.grad, ours.weight.grad, ours.bias.grad, *statistics]

    def formulas(norm: SyncedBatchNorm, data: Tensor) -> Tensor:
        norm.num_batches_tracked.sub_(1)
        return _functional.batch_norm(data, norm.weight, norm.bias, norm.eps, norm._statistics)

    for name, norm in made.items():
        pairs = zip(results(norm, False), results(norm, True), strict=True)
        worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-6)) for a, b in pairs)
        say(f"norm {name}", f"{'FAILED: ' if not worst < 1e-4 else ''}{worst:.1e} apart")


def kill(folder: Path) -> None:
    """A small run that is killed in its seventh step and resumed, against one that is left alone."""
    words = [
        sys.executable,
        "-m",
        "momentum2",
        "pretrain",
        "quickstart",
        "--method.name",
        "byol",
        "--train.device",
        "cuda",
        "--train.steps=12",
    ]
    words += ["--train.checkpoint_every=4", "--train.deterministic=true", "--monitor.knn_every=0"]
    words += ["--monitor.report=false", "--data.train_size=512"]
    subprocess.run([*words, "--out", str(folder / "alone")], check=True, capture_output=True)
    killer = (
        "import os, signal, sys\nfrom momentum2.methods.method import Method\nfrom momentum2.__main__ import main\n"
        "begin = Method.before_step\n"
        "def before_step(self, k):\n    if k == 6: os.kill(os.getpid(), signal.SIGKILL)\n    begin(self, k)\n"
        "Method.before_step = before_step\nsys.exit(main())\n"
    )
    program = folder / "killed.py"
    program.write_text(killer)
    killed = [sys.executable, str(program), *words[3:], "--out", str(folder / "killed")]
    subprocess.run(killed, check=False, capture_output=True)
    subprocess.run([*words, "--out", str(folder / "killed")], check=True, capture_output=True)
    ends = [load_file(folder / name / "encoder.safetensors") for name in ("alone", "killed")]
    differing = [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])]
    say("kill", f"FAILED: {len(differing)} tensors differ" if differing else "the same bits")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=32, help="of each process")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("There is no GPU here that torch can use.")
    with joined(choose_device("cuda")), tempfile.TemporaryDirectory() as name:
        shared = Path(broadcast_bytes(name.encode()).decode())  # process 0's
        say("device", f"{torch.cuda.get_device_name()}, capability {torch.cuda.get_device_capability()}")
        say(
            "torch", f"{torch.__version__}, CUDA {torch.version.cuda}, {distributed.world_size()} process(es)"
        )
        waits(options, shared)
        kernels(options, shared)
        norms()
        if distributed.world_size() == 1:
            kill(shared)
        if distributed.is_main():
            width = max(len(what) for what, _ in TABLE)
            print("\n| " + "what".ljust(width) + " | found |\n|" + "-" * (width + 2) + "|---|")
            for what, value in TABLE:
                print(f"| {what:<{width}} | {value} |")
    if any("FAILED" in value for _, value in TABLE):
        sys.exit(1)


if __name__ == "__main__":
    main()
