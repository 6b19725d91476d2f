"""From a config to what the loop is given."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from momentum2 import backbones, distributed
from momentum2.augment import Normalization, view_specs
from momentum2.config import Config, DataConfig, ExactOrder, Network, Precision
from momentum2.data import Dataset, Loader
from momentum2.data.cache import Packed
from momentum2.data.fingerprint import Fingerprint
from momentum2.data.views import ViewBatches
from momentum2.distributed.together import on_first
from momentum2.errors import SettingError
from momentum2.methods import Method
from momentum2.methods.method import places_of
from momentum2.runs.card import resolved_model
from momentum2.runs.directory import devices_of
from momentum2.runs.names import BAD_IMAGES
from momentum2.seeds import derive
from momentum2.training.device import autocast_dtype, has_bf16_instructions, resolve_precision
from momentum2.training.job import Job
from momentum2.training.plan import Plan, per_device
from momentum2.training.start import Record, started

#: Scores of a method's encoders after so many steps, by name, such as online kNN.
Score = Callable[[dict[Network, backbones.Encoder], int], dict[str, float]]

log = logging.getLogger("momentum2")


def build_method(
    config: Config, plan: Plan, classes: int, encoder: nn.Module | None = None, weights: Path | None = None
) -> Method:
    """The method with its initial weights, which depend on the seed alone; a given encoder starts with its own.

    `weights` is the file that the encoder starts from, if there is one.
    """
    model, resolved = config.model, resolved_model(config)
    torch.manual_seed(derive(config.train.seed, "initial weights"))
    channels = config.data.channels
    if encoder is not None:
        f = backbones.with_feature_dim(copy.deepcopy(encoder), config.data.image_size, channels)
    elif weights is not None and model.backbone.startswith(backbones.TIMM):
        f = started(config, weights)
    else:
        f = backbones.of_config(resolved, channels)
    if weights is not None and not model.backbone.startswith(backbones.TIMM):
        backbones.load_weights(f, weights)
    make = cast(Callable[..., Method], plan.method)  # every method that can be named takes these
    method = make(config, plan.schedule, f, plan.local_devices, classes)
    if config.train.recompute:
        _recompute(method.encoders()["student"], model.backbone)
    return method


def _recompute(encoder: nn.Module, name: str) -> None:
    try:
        cast(Any, encoder).set_grad_checkpointing(True)
    except AssertionError as error:  # how timm says that one of its networks cannot
        raise SettingError("train.recompute", f"does not work with {name} ({error}). Leave it out.") from None


def with_devices(config: Config, out: Path, kind: type[Method]) -> Config:
    """`config` with the number of devices that `auto` stands for: those of the run in `out`, or the processes."""
    if config.train.devices != "auto" or not per_device(config, kind):
        return config
    found = on_first(lambda: [b"%d" % (devices_of(out) or distributed.world_size())])
    return replace(config, train=replace(config.train, devices=int(found[0])))


def with_cache(data: DataConfig, before: Mapping[str, object]) -> DataConfig:
    """Cached and streamed images differ by a little, so what `auto` once resolved to holds for the whole run."""
    return replace(data, cache="on" if before["cached"] else "off") if "cached" in before else data


def with_precision(config: Config, before: Mapping[str, object], device: torch.device) -> Config:
    """`config` with the precision that `auto` stands for, which holds for the whole run.

    Versions that did not note it knew no fp16, and took bf16 on CPUs with instructions for it.
    """
    precision = resolve_precision(config.train.precision, device)
    if config.train.precision == "auto" and before:
        noted = cast(Precision, before.get("precision", "fp32" if precision == "fp16" else precision))
        precision = resolve_precision(noted, device)
        if "precision" not in before and device.type == "cpu" and has_bf16_instructions():
            log.warning(
                "This run did not record its precision. It continues in fp32, although it was in bf16 until here if it "
                "was started on this kind of CPU."
            )
    if config.train.recompute and device.type == "cpu" and autocast_dtype(precision, device) is not None:
        raise SettingError("train.recompute", "works on a CPU only in fp32. Set train.precision to fp32.")
    return replace(config, train=replace(config.train, precision=precision))


def make_job(
    config: Config,
    plan: Plan,
    method: Method,
    dataset: Dataset,
    out: Path,
    device: torch.device,
    score: Score | None,
    start: Record | None = None,
    order: ExactOrder = "exact",
    seen: Fingerprint | None = None,
) -> Job:
    """The method and its augmented batches, as the loop takes them.

    What the weights began as (`start`), and the order and fingerprint of the images, are kept with the run.
    """
    specs = view_specs(config.views, config.data.image_size, Normalization.of(config.data))

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
            order=order,
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
        validate=None if score is None else lambda done: score(method.encoders(), done),
        validate_every=config.monitor.knn_every * plan.steps_per_epoch,
        decided={
            "devices": plan.devices,
            "images": len(dataset),
            "cached": isinstance(dataset, Packed),
            "precision": resolve_precision(config.train.precision, device),
            "encoders": places_of(method),
            "order": order,
            **({} if seen is None else {"fingerprint": seen}),
            **({} if start is None else {"weights": dict(start)}),
        },
    )
