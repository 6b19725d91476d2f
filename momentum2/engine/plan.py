"""What a config comes to: steps, learning rate, momenta and group sizes, before anything is trained."""

from dataclasses import dataclass

from momentum2.config import Config
from momentum2.engine.checks import WITH_TEACHER, check
from momentum2.errors import UserError
from momentum2.schedules import Schedule, scaled_lr, scaled_weight_momentum

#: Which samples a norm's statistics come from when virtual devices (or processes) divide the batch.
PER_DEVICE = frozenset({"split", "momentum", "shuffle"})


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of a run on `world` processes."""

    images: int
    steps_per_epoch: int
    steps: int
    world: int
    micro_batch: int  # images in one forward of one process
    devices: int  # virtual devices in that forward
    schedule: Schedule
    student_bn: int | None  # samples that share BN statistics
    teacher_bn: int | None


def resolve(config: Config, images: int, world: int = 1) -> Plan:
    """Resolve `config` for a data set of `images` images, or say in one sentence why it cannot be run."""
    train, method, optim = config.train, config.method, config.optim
    batch, groups = train.batch_size, train.virtual_devices
    check(config)
    parts = world * train.accumulate
    if batch % (parts if groups == 1 else groups):
        what = (
            f"{world} process(es) × {train.accumulate} micro-batch(es)"
            if groups == 1
            else f"{groups} virtual devices"
        )
        raise UserError(f"--train.batch_size {batch} cannot be divided among {what}; choose a multiple.")
    if groups > 1 and groups % parts:
        raise UserError(
            f"--train.virtual_devices {groups} cannot be divided among {world} process(es) × {train.accumulate} "
            "micro-batch(es); choose a multiple of their product."
        )
    if batch > images:
        raise UserError(
            f"The data set has {images} images, fewer than one batch: choose --train.batch_size {images} or less."
        )
    steps_per_epoch = images // batch
    steps = train.steps if train.steps is not None else train.epochs * steps_per_epoch
    micro_batch, devices = batch // parts, max(1, groups // parts)
    has_teacher = method.name in WITH_TEACHER
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

    def samples(norm: str) -> int:
        if norm == "synced":
            return micro_batch * world
        return micro_batch // devices if norm in PER_DEVICE else micro_batch

    for side, count in (("student", samples(method.student_norm)), ("teacher", samples(method.teacher_norm))):
        if count < 2 and not method.freeze_encoder and (side == "student" or has_teacher):
            raise UserError(
                f"The {side}'s batch norm would see {count} sample; it needs at least 2: raise --train.batch_size or "
                "lower --train.virtual_devices or --train.accumulate."
            )
    return Plan(
        images=images,
        steps_per_epoch=steps_per_epoch,
        steps=steps,
        world=world,
        micro_batch=micro_batch,
        devices=devices,
        schedule=schedule,
        student_bn=None if method.freeze_encoder else samples(method.student_norm),
        teacher_bn=samples(method.teacher_norm) if has_teacher else None,
    )


def describe(config: Config, plan: Plan) -> list[tuple[str, str]]:
    """The plan as (what, value) lines: the content of `plan.txt`."""
    s, K = plan.schedule, plan.steps
    method, train = config.method, config.train

    def over_time(values: tuple[float, float, float]) -> str:
        return " → ".join(f"{v:.4g}" for v in values) + " (start → middle → end)"

    at = (0, K // 2, K)
    samples = f"{plan.steps * train.batch_size:,} samples"
    lines = [
        ("method", method.name),
        ("backbone", f"{config.model.backbone}, {config.model.stem} stem, width {config.model.width:g}"),
        ("data", f"{plan.images:,} images ({config.data.name}) at {config.data.image_size} px"),
        ("steps", f"{K:,} of {train.batch_size} images ({K / plan.steps_per_epoch:.4g} epochs, {samples})"),
        ("processes", f"{plan.world}, {train.accumulate} micro-batch(es) of {plan.micro_batch} each"),
        ("lr", f"peak {s.lr_base:.4g}, {over_time((s.lr(at[0]), s.lr(at[1]), s.lr(at[2])))}"),
        ("warm-up", f"{s.warmup:,} steps"),
    ]
    if plan.teacher_bn is not None:
        lines.append(("m", over_time((s.m(at[0]), s.m(at[1]), s.m(at[2])))))
        if method.teacher_norm == "momentum":
            lines.append(("alpha", over_time((s.alpha(at[0]), s.alpha(at[1]), s.alpha(at[2])))))
    if plan.student_bn is not None:
        lines.append(("student BN", f"{method.student_norm}, {plan.student_bn} samples"))
    if plan.teacher_bn is not None:
        lines.append(("teacher BN", f"{method.teacher_norm}, {plan.teacher_bn} samples"))
    return lines
