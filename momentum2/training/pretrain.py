"""From a config to a run directory with an encoder in it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from momentum2 import backbones, distributed
from momentum2.augment import view_specs
from momentum2.config import Config, DataConfig, Network
from momentum2.data import Dataset, Loader, open_dataset
from momentum2.data.cache import Packed
from momentum2.data.views import ViewBatches
from momentum2.distributed.together import joined, on_first
from momentum2.errors import UserError
from momentum2.methods import METHODS, Method
from momentum2.runs.directory import Resume, devices_of, open_run
from momentum2.runs.encoder import EncoderCard, save_encoder
from momentum2.runs.names import BAD_IMAGES, ENCODER, PLAN
from momentum2.seeds import derive
from momentum2.training.checks import check
from momentum2.training.device import choose_device, keep_large_blocks
from momentum2.training.job import Job
from momentum2.training.loop import fit
from momentum2.training.plan import Plan, describe, idle_settings, per_device, resolve

#: Scores of a method's encoders by name, such as online kNN.
Score = Callable[[dict[Network, backbones.Encoder]], dict[str, float]]


def build_method(config: Config, plan: Plan, classes: int) -> Method:
    """The method with its initial weights, which depend on the seed alone."""
    torch.manual_seed(derive(config.train.seed, "initial weights"))
    model = config.model
    encoder = backbones.build(model.backbone, model.stem, model.width, model.zero_init_residual)
    if model.weights:
        backbones.load_weights(encoder, model.weights)
    return METHODS[config.method.name](config, plan.schedule, encoder, plan.local_devices, classes)


def pretrain(
    config: Config,
    out: Path,
    resume: Resume = "auto",
    make_score: Callable[[Config], Score | None] | None = None,
) -> bool:
    """Train as `config` says in the run directory `out`, going on from its newest checkpoint if there is one.

    Args:
        config: The whole run.
        out: The run directory.
        resume: What to do if it exists, or does not.
        make_score: Makes the function that scores the encoders every `monitor.knn_every` epochs, or None.

    Returns:
        Whether the run is finished; a signal may have stopped it early.
    """
    check(config)
    device = choose_device(config.train.device)
    keep_large_blocks()
    with (
        joined(device),
        open_run(out, config := with_devices(config, out), resume, idle_settings(config)) as run,
    ):
        before = run.checkpoints.info()
        dataset = open_dataset(_as_before(config.data, before), seed=config.train.seed)
        if before.get("images", len(dataset)) != len(dataset):
            raise UserError(
                f"{out} was started with {before['images']:,} images, and now there are {len(dataset):,}; give it the "
                "same ones, or choose another --out."
            )
        if config.method.name == "supervised" and dataset.labels is None:
            raise UserError("Method supervised needs labels: give each class of images a folder of its own.")
        plan = resolve(config, len(dataset), distributed.world_size())
        if distributed.is_main():
            text = "".join(f"{name:<12}{value}\n" for name, value in describe(config, plan))
            (out / PLAN).write_text(text, encoding="utf-8")
            print(text, end="")
        method = build_method(config, plan, len(dataset.class_names or ()))
        method.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        score = make_score(config) if make_score else None
        finished = fit(make_job(config, plan, method, dataset, out, device, score), run)
        if finished and distributed.is_main():
            network, encoder = next(iter(method.encoders().items()))
            card = EncoderCard.of_run(config, encoder.feature_dim, network, plan.steps)
            save_encoder(out / ENCODER, encoder, card)
    return finished


def with_devices(config: Config, out: Path) -> Config:
    """`config` with the number of devices that `auto` stands for: those of the run in `out`, or the processes."""
    if config.train.devices != "auto" or not per_device(config):
        return config
    found = on_first(lambda: [b"%d" % (devices_of(out) or distributed.world_size())])
    return replace(config, train=replace(config.train, devices=int(found[0])))


def make_job(
    config: Config,
    plan: Plan,
    method: Method,
    dataset: Dataset,
    out: Path,
    device: torch.device,
    score: Score | None,
) -> Job:
    """The method and its augmented batches, as the loop takes them."""
    specs = view_specs(config.views, config.data.image_size)

    def batches(start: int) -> ViewBatches:
        loader = Loader(
            dataset,
            specs,
            seed=config.train.seed,
            batch_size=config.train.batch_size,
            start=start,
            stop=plan.steps,
            accumulate=config.train.accumulate,
            rank=distributed.rank(),
            world=plan.world,
            device=device,
            workers=config.data.workers,
            bad_images=out / BAD_IMAGES,
        )
        return ViewBatches(loader, specs)

    return Job(
        method=method,
        batches=batches,
        lr=plan.schedule.lr,
        lr_peak=plan.schedule.lr_base,
        steps=plan.steps,
        steps_per_epoch=plan.steps_per_epoch,
        train=config.train,
        optim=config.optim,
        monitor=config.monitor,
        device=device,
        validate=None if score is None else lambda: score(method.encoders()),
        validate_every=config.monitor.knn_every * plan.steps_per_epoch,
        decided={"images": len(dataset), "cached": isinstance(dataset, Packed)},
    )


def _as_before(data: DataConfig, before: Mapping[str, object]) -> DataConfig:
    """Cached and streamed images differ by a little, so what `auto` once came to holds for the whole run."""
    return replace(data, cache="on" if before["cached"] else "off") if "cached" in before else data
