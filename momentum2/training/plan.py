"""What a config resolves to: steps, learning rate, momenta and group sizes, before anything is trained."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from momentum2.backbones import TIMM, Facts
from momentum2.config import Config, OptimConfig
from momentum2.data import Dataset, open_dataset
from momentum2.errors import SettingError, UserError
from momentum2.methods import METHODS, Method
from momentum2.optim import READ_BY
from momentum2.schedules import Schedule, scaled_lr, scaled_weight_momentum
from momentum2.training.checks import check, method_class, number_of_views

_TOLD = 10  # classes that are named
#: The norms whose statistics are those of a device.
PER_DEVICE = frozenset({"local", "momentum", "shuffle"})


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of a run on `world` processes."""

    images: int
    steps_per_epoch: int
    steps: int
    world: int
    micro_batch: int  # images in one forward of one process
    devices: int  # of the algorithm
    local_devices: int  # of them in this process
    method: type[Method]
    schedule: Schedule
    student_bn: int | None  # samples that share BN statistics
    teacher_bn: int | None


def per_device(config: Config, kind: type[Method]) -> bool:
    """Whether the number of devices decides what is computed: some norm has a device's own statistics."""
    method = config.method
    norms = {method.student_norm, method.teacher_norm} if kind.has_teacher else {method.student_norm}
    return not method.freeze_encoder and bool(norms & PER_DEVICE)


def idle_settings(config: Config, kind: type[Method]) -> frozenset[str]:
    """The settings that decide nothing with this config."""
    return frozenset() if per_device(config, kind) else frozenset({"train.devices"})


def unused_settings(config: Config, kind: type[Method]) -> set[str]:
    """The settings that have no effect with this config: what its method, optimizer and views do not read."""
    of_methods = set().union(*(method.reads for method in METHODS.values()))
    unused = (of_methods - kind.reads) | kind.idle(config) | idle_settings(config, kind)
    unused |= {f"optim.{name}" for name, names in READ_BY.items() if config.optim.name not in names}
    if not config.optim.warmup_epochs:
        unused.add("optim.warmup_start")
    if config.views.recipe != "multicrop":
        unused |= {"views.small_crops", "views.small_size"}
    elif not config.views.small_crops:
        unused.add("views.small_size")
    if config.train.steps is not None:
        unused.add("train.epochs")
    if config.eval_data.name == "none":
        unused.add("monitor.knn_every")
    if config.eval_data.name == "none" or not config.monitor.knn_every:
        unused |= {"monitor.knn_images", "monitor.knn_k", "monitor.knn_temperature"}
    return unused


class Sharing(NamedTuple):
    """How a batch is shared, before the images are known."""

    devices: int  # of the algorithm
    student_bn: int | None  # samples that share BN statistics
    teacher_bn: int | None


def share(config: Config, world: int, kind: type[Method]) -> Sharing:
    """Share the batch among devices and processes, or say in one sentence why it cannot be."""
    train, method, batch = config.train, config.method, config.train.batch_size
    by_device = per_device(config, kind)
    devices = world
    if by_device and train.devices != "auto":
        devices = train.devices
        if devices % world:
            divisors = [str(w) for w in range(1, devices + 1) if devices % w == 0]
            raise SettingError(
                "train.devices",
                f"{devices} cannot be divided among {world} processes. Start {' or '.join(divisors)} of them.",
            )
    if batch % (devices * train.accumulate):
        what = f"{devices} device(s)" if by_device else f"{world} process(es)"
        raise SettingError(
            "train.batch_size",
            f"{batch} cannot be divided among {what} × {train.accumulate} micro-batch(es). "
            f"Choose a multiple of {devices * train.accumulate}.",
        )
    micro_batch = batch // train.accumulate  # over all processes

    def samples(norm: str) -> int | None:
        return None if norm == "ema" else micro_batch // (devices if norm in PER_DEVICE else 1)

    student_bn = None if method.freeze_encoder else samples(method.student_norm)
    teacher_bn = samples(method.teacher_norm) if kind.has_teacher else None
    for side, count in (("student", student_bn), ("teacher", teacher_bn)):
        if count is not None and count < 2:
            raise SettingError(
                "train.batch_size",
                f"{batch} is too small: the {side}'s batch norm needs at least 2 samples but would get {count}. Raise "
                "it, or use fewer devices or micro-batches.",
            )
    return Sharing(devices, student_bn, teacher_bn)


def resolve(config: Config, images: int, world: int = 1, own: type[Method] | None = None) -> Plan:
    """Resolve `config` for a data set of `images` images, or say in one sentence why it cannot be run.

    `own` is the class of the method where Python gave one.
    """
    kind = method_class(config, own)
    check(config, kind)
    train, method, optim, batch = config.train, config.method, config.optim, config.train.batch_size
    sharing = share(config, world, kind)
    if batch > images:
        raise SettingError(
            "train.batch_size", f"{batch} exceeds the number of images ({images}). Choose at most {images}."
        )
    steps_per_epoch = images // batch
    steps = train.steps if train.steps is not None else train.epochs * steps_per_epoch
    schedule = Schedule(
        K=steps,
        lr_base=scaled_lr(optim.lr, batch),
        warmup=min(round(optim.warmup_epochs * steps_per_epoch), steps),
        warmup_start=optim.warmup_start,
        m_base=scaled_weight_momentum(method.weight_momentum, batch, method.reference_batch),
        m_constant=method.weight_schedule == "constant",
        alpha_base=method.alpha_base,
        alpha_fixed=None if method.alpha == "cosine" else method.alpha,
        milestones=tuple(optim.milestones or ()),
    )
    return Plan(
        images=images,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        world=world,
        micro_batch=batch // (train.accumulate * world),
        devices=sharing.devices,
        local_devices=sharing.devices // world,
        method=kind,
        schedule=schedule,
        student_bn=sharing.student_bn,
        teacher_bn=sharing.teacher_bn,
    )


def describe(
    config: Config, plan: Plan, encoder: Facts, start: Mapping[str, str] | None = None
) -> list[tuple[str, str]]:
    """The plan as (what, value) lines: the content of `plan.txt`; `start` is what is known of the first weights."""
    s, K = plan.schedule, plan.steps
    method, train = config.method, config.train

    def over_time(value: Callable[[int], float | str]) -> str:
        if value(0) == "auto":
            return "auto: each norm chooses its own"
        return " → ".join(f"{value(k):.4g}" for k in (0, K // 2, K)) + " (start → middle → end)"

    samples = f"{plan.steps * train.batch_size:,} samples"
    lines = [
        ("method", method.name if method.name != "own" else f"{plan.method.__name__} (own)"),
        ("backbone", _backbone(encoder)),
        *([("weights", _weights(start))] if start else []),
        ("data", _data(config, plan)),
        ("steps", f"{K:,} of {train.batch_size} images ({K / plan.steps_per_epoch:.4g} epochs, {samples})"),
        *([("views", _views(config))] if config.views.repeat > 1 else []),
        *([("devices", _devices(config, plan))] if per_device(config, plan.method) else []),
        ("processes", f"{plan.world}, {train.accumulate} micro-batch(es) of {plan.micro_batch} each"),
        ("lr", f"peak {_peak(config, plan)}, {over_time(s.lr)}"),
        ("warm-up", f"{s.warmup:,} steps" + (", the whole run" if s.warmup == K else "")),
        *([("optimizer", told)] if (told := _optimizer(config.optim, plan)) else []),
    ]
    if plan.method.has_teacher:
        lines.append(("m", over_time(s.m)))
        if method.teacher_norm == "momentum":
            lines.append(("alpha", over_time(s.alpha)))
    if plan.student_bn is not None:
        lines.append(("student BN", f"{method.student_norm}, {plan.student_bn} samples"))
    if plan.teacher_bn is not None:
        lines.append(("teacher BN", f"{method.teacher_norm}, {plan.teacher_bn} samples"))
    elif plan.method.has_teacher:
        lines.append(("teacher BN", f"{method.teacher_norm}, the student's running statistics"))
    if encoder.batch_norms == 0:
        lines.append(("batch norm", f"the encoder has none; {_heads(plan.method, config)}"))
    return lines


def describe_images(config: Config, images: Dataset) -> list[tuple[str, str]]:
    """What is known of the images: their classes, and what a result on the test images has to beat."""
    lines = [("labels", _classes(images))]
    if config.eval_data.name != "none":
        with suppress(UserError):  # said where they are needed
            test = open_dataset(replace(config.eval_data, cache="off"), config.eval_data.test_split)
            if test.labels is not None and len(test):
                chance = np.bincount(test.labels).max() / len(test)
                split = config.eval_data.test_split
                lines.append(
                    ("test", f"{len(test):,} images ({split}), chance {chance:.1%}: its largest class")
                )
    return lines


def _classes(images: Dataset) -> str:
    if images.labels is None or images.class_names is None:
        return "none: no folders or columns name classes"
    names, counts = images.class_names, np.bincount(images.labels, minlength=len(images.class_names))
    told = ", ".join(f"{name} {count:,}" for name, count in zip(names[:_TOLD], counts[:_TOLD], strict=True))
    rest = counts[_TOLD:]
    more = f" and {len(rest):,} more of {rest.min():,} to {rest.max():,} images" if len(rest) else ""
    return f"{len(names):,} classes: {told}{more}"


def _data(config: Config, plan: Plan) -> str:
    data = config.data
    said = f"{plan.images:,} images ({data.name}) at {data.image_size} px"
    if data.channels == 3:
        return said
    count = f"{data.channels} channel{'s' * (data.channels != 1)}"
    return f"{said}, {count}: hue, saturation and gray, which need three, are off"


def _views(config: Config) -> str:
    """Where a recipe's views are drawn several times."""
    views, repeat = number_of_views(config), config.views.repeat
    once = f"the {views // repeat} of the augmentations {config.views.recipe}"
    return f"{views} per image: {once}, each drawn {repeat} times"


def _optimizer(optim: OptimConfig, plan: Plan) -> str:
    """What is unusual about the optimizer."""
    told: list[str] = [optim.name] if optim.name == "adamw" else []
    if optim.weight_decay_end is not None:
        told.append(f"weight decay {optim.weight_decay:g} → {optim.weight_decay_end:g}")
    if optim.encoder_lr != 1:
        told.append(f"the encoder's rate × {optim.encoder_lr:g}")
    if optim.layer_decay is not None:
        told.append(f"× {optim.layer_decay:g} from layer to layer")
    if optim.freeze_encoder_epochs:
        frozen = round(optim.freeze_encoder_epochs * plan.steps_per_epoch)
        told.append(f"the encoder frozen for {frozen:,} steps")
    return ", ".join(told)


def _weights(start: Mapping[str, str]) -> str:
    terms = f"license {start['license']}, " if "license" in start else ""
    return f"{start['name']}, {terms}SHA-256 {start['sha256']}"


def _backbone(encoder: Facts) -> str:
    name, stem, width, options, _ = encoder.architecture
    shape = [] if name.startswith(TIMM) else [f"{stem} stem", f"width {width:g}"]  # of torchvision's ResNets
    told = ", ".join([name, *shape, *options])
    told += f", {encoder.parameters / 1e6:.3g} M parameters, {encoder.feature_dim} features"
    side = encoder.map_side
    if side is not None and side < 4:
        told += (
            f"; its last map is {side}×{side}, so a network of smaller stride, or larger images, may see more"
        )
    return told


def _heads(kind: type[Method], config: Config) -> str:
    """Where batch norm is that an encoder without it leaves."""
    if not kind.norms_in_heads(config):
        return "nor have its heads, so norms and alpha have no effect"
    return "only its heads have, so norms and alpha are theirs"


def _peak(config: Config, plan: Plan) -> str:
    batch = config.train.batch_size
    return f"{plan.schedule.lr_base:.4g} ({config.optim.lr:g} per 256 images × {batch} / 256)"


def _devices(config: Config, plan: Plan) -> str:
    each = config.train.batch_size // (plan.devices * config.train.accumulate)
    chosen = " (as many as processes at the first start)" if config.train.devices == "auto" else ""
    return f"{plan.devices}{chosen}, each with {each} images per micro-batch"
