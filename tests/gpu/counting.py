"""Runs of the real loop on the fake device, step by step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fake import CUDA, Count, Device, fake_cuda

from momentum2.config import Config, DataConfig, MethodConfig, ModelConfig, MonitorConfig, TrainConfig
from momentum2.data import open_dataset
from momentum2.methods import Method
from momentum2.runs.checkpoint import Checkpoints
from momentum2.runs.directory import open_run
from momentum2.training.build import build_method, make_job
from momentum2.training.loop import fit
from momentum2.training.plan import resolve

#: Steps of a run: the first has momentum buffers to make, the third is logged and saved.
STEPS = 3


@dataclass
class Counted:
    """A usual step, the last one with its log line, and the checkpoint behind it."""

    usual: Count
    logged: Count
    saved: Count
    device: Device


def config(
    method: MethodConfig,
    size: int = 96,
    images: int = 8,
    world: int = 1,
    train: dict[str, Any] | None = None,
    **model: Any,
) -> Config:
    """`images` for each of `world` processes; ResNet-10 unless `model` says otherwise."""
    model = {"backbone": "resnet10", "projector_hidden": 64, "projector_out": 32, **model}
    options = {
        "steps": STEPS,
        "batch_size": images * world,
        "precision": "bf16",
        "devices": world,
        **(train or {}),
    }
    return Config(
        method=method,
        model=ModelConfig(**model),
        data=DataConfig("shapes", image_size=size, train_size=4 * images * world, cache="off", workers=0),
        train=TrainConfig(**options),
        monitor=MonitorConfig(log_every=3, report=False),
    )


def count(config: Config, out: Path, world: int = 1) -> Counted:
    """Train on the fake device, in one of `world` processes."""
    dataset = open_dataset(config.data, seed=0)
    plan = resolve(config, len(dataset), world)
    with fake_cuda(world) as device:
        method = build_method(config, plan, len(dataset.class_names or ()))
        method.to(CUDA, memory_format=torch.channels_last)  # type: ignore[call-overload]
        counts: list[Count] = []
        begin = Method.before_step

        def before_step(self: Method, k: int) -> None:
            counts.append(device.step())
            begin(self, k)

        def save(self: Checkpoints, *args: Any) -> None:
            counts.append(device.step())
            write(self, *args)

        write = Checkpoints.begin
        with (
            patch.object(Method, "before_step", before_step),
            patch.object(Checkpoints, "begin", save),
            open_run(out, config, "auto", frozenset()) as run,
        ):
            fit(make_job(config, plan, method, dataset, out, CUDA, None), run)
        counts.append(device.step())
        return Counted(counts[2], counts[3], counts[4], device)
