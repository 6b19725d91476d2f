"""What the settings resolve to for a number of images and processes."""

from dataclasses import dataclass

from momentum2.detection.presets import DetectConfig
from momentum2.errors import SettingError
from momentum2.schedules import scaled_lr, warmup_step_decay
from momentum2.settings import check as check_settings
from momentum2.training.checks import check_optim

_MILESTONES = (2 / 3, 8 / 9)  # of 1x: steps 60,000 and 80,000
_SCHEDULE_IMAGES = {"1x": 90_000 * 16, "2x": 180_000 * 16}


@dataclass(frozen=True)
class DetectionPlan:
    """The resolved numbers of a run."""

    steps: int
    steps_per_epoch: int
    lr_base: float
    warmup: int
    warmup_start: float
    milestones: tuple[float, ...]

    def lr(self, k: int) -> float:
        """Learning rate of the step after k are done."""
        return warmup_step_decay(self.lr_base, k, self.steps, self.milestones, self.warmup, self.warmup_start)


def check(config: DetectConfig) -> None:
    """Raise a `UserError` for a value that cannot work, before anything is opened or written."""
    check_settings(config)
    check_optim(config.optim)
    if config.train.devices not in ("auto", 1):
        raise SettingError(
            "train.devices", "is only for pretraining; the norms of detectors are synced. Leave it out."
        )
    if config.network is not None and config.init != "encoder":
        raise SettingError("network", f"chooses an encoder of RUN, but init is {config.init}. Leave it out.")


def resolve(config: DetectConfig, steps_per_epoch: int, world: int) -> DetectionPlan:
    """Resolve `config`, or say in one sentence why it cannot be run."""
    train = config.train
    if train.batch_size % (world * train.accumulate):
        raise SettingError(
            "train.batch_size",
            f"{train.batch_size} cannot be divided among {world} process(es) × {train.accumulate} micro-batch(es). "
            f"Choose a multiple of {world * train.accumulate}.",
        )
    if train.steps is not None:
        steps = train.steps
    elif config.schedule == "epochs":
        steps = train.epochs * steps_per_epoch
    else:
        steps = _SCHEDULE_IMAGES[config.schedule] // train.batch_size
    epochs = config.optim.warmup_epochs
    warmup = min(round(epochs * steps_per_epoch), steps) if epochs else min(config.warmup_steps, steps // 10)
    return DetectionPlan(
        steps=steps,
        steps_per_epoch=steps_per_epoch,
        lr_base=scaled_lr(config.optim.lr, train.batch_size),
        warmup=warmup,
        warmup_start=config.optim.warmup_start,
        milestones=tuple(config.optim.milestones or _MILESTONES),
    )
