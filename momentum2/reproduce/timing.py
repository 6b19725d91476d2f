"""Seconds per iteration of several configs in turns, on the processes of torchrun.

    torchrun --nproc-per-node 2 -m momentum2.reproduce.timing seconds.json A/config.yaml B/config.yaml

A busy machine slows all of them alike, so that their ratios hold. What is written has a list of turns for each config.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from momentum2 import distributed
from momentum2.distributed.together import joined
from momentum2.files import write_whole
from momentum2.settings import config_from_file
from momentum2.training.device import choose_device, keep_large_blocks
from momentum2.training.estimate import make_step
from momentum2.training.plan import resolve

REPEATS = 50
_IMAGES = 1_000_000  # the length of the schedule, which takes no time


def measure(configs: list[Path], repeats: int = REPEATS) -> list[list[float]]:
    """Seconds of an optimizer step of each config, turn by turn."""
    keep_large_blocks()
    read = [config_from_file(path) for path in configs]
    read = [replace(config, train=replace(config.train, threads=1)) for config in read]
    device = choose_device(read[0].train.device)
    with joined(device):
        steps = []
        for config in read:
            steps.append(make_step(config, resolve(config, _IMAGES, distributed.world_size()), 10, device))
        seconds: list[list[float]] = [[] for _ in steps]
        for k in range(repeats + 2):
            for step, times in zip(steps, seconds, strict=True):
                distributed.barrier()
                start = time.perf_counter()
                step(k)
                distributed.barrier()
                times.append(time.perf_counter() - start)
    return [times[2:] for times in seconds]  # the first two warm up


if __name__ == "__main__":
    result = measure([Path(p) for p in sys.argv[2:]])
    if os.environ.get("RANK", "0") == "0":
        write_whole(Path(sys.argv[1]), json.dumps(result).encode())
