"""Optimizer steps per second on two cores or more, quiet and beside busy neighbors.

    python benchmarks/busy.py [--neighbors 4] [--batches 32 128] [--rounds 3] [--seconds 2] [--json FILE]

BYOL with a momentum teacher, ResNet-18 of quarter width at 32 px, fp32, augmentation included. The candidates:

    one thread    one thread, one call of the method
    openmp        as many threads inside each operation as there are cores, one call: what version 0.1 did
    by view       one thread for each view, as `pretrain` takes them (momentum2.training.by_view)

Each is a process of its own, and they take turns: a turn lasts some seconds, and in each round every candidate has one.
A neighbor is a process that multiplies matrices on one thread without end. Figures are medians over the rounds.
"""

import argparse
import json
import multiprocessing
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from momentum2.augment import draw, render, view_specs
from momentum2.config import Config, MethodConfig, ModelConfig, TrainConfig, ViewsConfig
from momentum2.machine import allowed_cores
from momentum2.optim import build_optimizer
from momentum2.training.build import build_method
from momentum2.training.by_view import Threads
from momentum2.training.device import keep_large_blocks
from momentum2.training.plan import resolve
from momentum2.training.step import Stepper

SIZE = 32
CANDIDATES = ("one thread", "openmp", "by view")


def work(candidate: str, batch: int, method: str, turns: Connection) -> None:
    """Take steps for as many seconds as the other end says; answer with their number per second."""
    keep_large_blocks()
    cores = allowed_cores()
    threads = {
        "one thread": Threads(1, False),
        "openmp": Threads(cores, False),
        "by view": Threads(max(1, cores // 2), True, min(2, cores)),
    }[candidate]
    config = Config(
        method=MethodConfig(method, queue_size=1024),
        model=ModelConfig("resnet18", "small", 0.25, projector_hidden=512, projector_out=128),
        train=TrainConfig(batch_size=batch, precision="fp32", devices=1),
    )
    plan = resolve(replace(config, train=replace(config.train, steps=100_000)), 1_000_000)
    built = build_method(config, plan, 0).to(memory_format=torch.channels_last).train()
    optimizer = build_optimizer(built.named_parameters(), config.optim, 0.05)
    take_step = Stepper(built, optimizer, config.train, config.optim, torch.device("cpu"), threads)
    specs = view_specs(ViewsConfig("byol"), SIZE)
    images = torch.randint(0, 256, (batch, SIZE, SIZE, 3), dtype=torch.uint8).permute(0, 3, 1, 2)

    def step(k: int) -> None:
        draws = [draw(spec, 0, k, view, batch) for view, spec in enumerate(specs)]
        take_step(k, 0.05, lambda i: (render(images, draws, specs, channels_last=True), None))

    for k in range(3):  # warms up; by view, the first is taken in one thread
        step(k)
    turns.send(None)
    while (seconds := turns.recv()) is not None:
        begin, steps = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            k, steps = k + 1, steps + 1
            step(k)
        turns.send(steps / (time.perf_counter() - begin))


def disturb() -> None:
    torch.set_num_threads(1)
    x = torch.randn(256, 256)
    while True:
        x @ x


def measure(batch: int, neighbors: int, options: argparse.Namespace) -> dict[str, float]:
    """Steps per second of each candidate."""
    context = multiprocessing.get_context("spawn")
    ends, found = {}, {name: [] for name in options.candidates}
    for name in options.candidates:
        ends[name], other = context.Pipe()
        context.Process(target=work, args=(name, batch, options.method, other), daemon=True).start()
        ends[name].recv()
    others = [context.Process(target=disturb, daemon=True) for _ in range(neighbors)]
    for other in others:
        other.start()
    if others:
        time.sleep(5)  # until they have begun
    for _ in range(options.rounds):
        for name, end in ends.items():
            end.send(options.seconds)
            found[name].append(end.recv())
    for end in ends.values():
        end.send(None)
    for other in others:
        other.kill()
        other.join()
    return {name: median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--neighbors", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--method", default="byol")
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=CANDIDATES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS", None)  # of what is started here
    rows = []
    print(f"{allowed_cores()} cores, steps per second")
    for neighbors in options.neighbors:
        for batch in options.batches:
            found = measure(batch, neighbors, options)
            rows.append({"neighbors": neighbors, "batch": batch, **found})
            shown = "  ".join(f"{name} {value:7.2f}" for name, value in found.items())
            print(f"{neighbors} neighbors, batch {batch:>4}: {shown}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
