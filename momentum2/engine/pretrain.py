"""From a config to a run directory with an encoder in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from momentum2 import backbones, distributed
from momentum2.augment import ViewSpec, render, view_specs
from momentum2.config import Config
from momentum2.data import Batch, Dataset, Loader, open_dataset
from momentum2.engine.device import choose_device, keep_large_blocks
from momentum2.engine.encoder import EncoderCard, save_encoder
from momentum2.engine.plan import Plan, describe, resolve
from momentum2.engine.run import Resume, Run, open_run
from momentum2.engine.train import Job, fit
from momentum2.engine.together import lost_process
from momentum2.errors import UserError
from momentum2.methods import METHODS, Method
from momentum2.seeds import derive

#: Scores of a method's encoders by name, such as online kNN.
Score = Callable[[dict[str, nn.Module]], dict[str, float]]


def build_method(config: Config, plan: Plan, classes: int) -> Method:
    """The method with its initial weights, which depend on the seed alone."""
    torch.manual_seed(derive(config.train.seed, "initial weights"))
    encoder = backbones.build(config.model.backbone, config.model.stem, config.model.width)
    if config.model.weights:
        backbones.load_weights(encoder, config.model.weights)
    return METHODS[config.method.name](config, plan.schedule, encoder, plan.devices, classes)


@lost_process()
def pretrain(config: Config, out: Path, resume: Resume = "auto", score: Score | None = None) -> bool:
    """Train as `config` says in the run directory `out`, going on from its newest checkpoint if there is one.

    Returns whether the run is finished; a signal may have stopped it early.
    """
    device = choose_device(config.train.device)
    keep_large_blocks()
    distributed.setup(device)
    try:
        dataset = open_dataset(config.data, seed=config.train.seed)
        if config.method.name == "supervised" and dataset.labels is None:
            raise UserError("Method supervised needs labels: give each class of images a folder of its own.")
        plan = resolve(config, len(dataset), distributed.world_size())
        method = build_method(config, plan, len(dataset.class_names or ()))
        method.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        with open_run(out, config, resume) as run:
            if distributed.is_main():
                lines = describe(config, plan)
                (out / "plan.txt").write_text("".join(f"{name:<12}{value}\n" for name, value in lines))
            finished = fit(make_job(config, plan, method, dataset, run, device, score), run)
            if finished and distributed.is_main():
                network, encoder = next(iter(method.encoders().items()))
                save_encoder(out / "encoder.safetensors", encoder, card(config, network, plan.steps, encoder))
        return finished
    finally:
        distributed.teardown()
