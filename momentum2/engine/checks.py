"""Settings that cannot be meant, said in one sentence before anything is opened or written."""

import math
from dataclasses import asdict
from typing import Any

from momentum2.augment import view_specs
from momentum2.config import Config, OptimConfig
from momentum2.errors import UserError

#: The methods that have a teacher.
WITH_TEACHER = frozenset({"byol", "moco"})

#: Smallest and largest value of numeric settings; None is not checked.
LIMITS: dict[str, tuple[float, float]] = {
    "method.alpha": (0, 1),
    "method.alpha_base": (0, 1),
    "method.weight_momentum": (0, 1),
    "method.reference_batch": (1, math.inf),
    "method.temperature": (1e-6, math.inf),
    "method.queue_size": (1, math.inf),
    "model.width": (1e-3, math.inf),
    "model.projector_hidden": (1, math.inf),
    "model.projector_out": (1, math.inf),
    "model.predictor_hidden": (1, math.inf),
    "data.image_size": (8, math.inf),
    "data.workers": (0, math.inf),
    "data.max_bad_fraction": (0, 1),
    "eval_data.image_size": (8, math.inf),
    "eval_data.workers": (0, math.inf),
    "train.epochs": (1, math.inf),
    "train.steps": (1, math.inf),
    "train.batch_size": (2, math.inf),
    "train.accumulate": (1, math.inf),
    "train.virtual_devices": (1, math.inf),
    "train.checkpoint_every": (1, math.inf),
    "train.keep": (1, math.inf),
    "train.threads": (0, math.inf),
    "optim.lr": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.sgd_momentum": (0, 1),
    "optim.warmup_epochs": (0, math.inf),
    "optim.warmup_start": (0, 1),
    "optim.clip_norm": (1e-12, math.inf),
    "optim.lars_eta": (0, math.inf),
    "monitor.log_every": (1, math.inf),
    "monitor.knn_every": (0, math.inf),
    "monitor.knn_k": (1, math.inf),
    "monitor.knn_temperature": (1e-6, math.inf),
    "monitor.collapse_steps": (1, math.inf),
    "monitor.wait_fraction": (0, 1),
    "monitor.slow_step": (1, math.inf),
}


def check(config: Config) -> None:
    """Raise a `UserError` for a value out of its limits, or for views that do not suit the method."""
    check_limits(asdict(config), LIMITS)
    check_optim(config.optim)
    method = config.method
    views = len(view_specs(config.views, config.data.image_size))
    if method.name == "supervised":
        if views > 1 and config.views.recipe != "supervised":
            raise UserError("Method supervised takes one view: add --views.recipe supervised.")
    elif views < 2:
        raise UserError(
            f"Method {method.name} compares two views: choose --views.recipe byol, not {config.views.recipe}."
        )
    elif views > 2 and method.name != "byol":
        raise UserError(f"Small crops are for method byol; {method.name} takes two views.")
    if method.teacher_norm == "shuffle" and method.name != "moco":
        raise UserError("--method.teacher_norm shuffle is MoCo's; use it with --method.name moco.")
    if method.export == "teacher" and method.name not in WITH_TEACHER:
        raise UserError(f"Method {method.name} has no teacher to export; leave --method.export out.")
    if method.name == "moco" and method.queue_size < config.train.batch_size:
        raise UserError(
            f"--method.queue_size must be at least the batch size, {config.train.batch_size}, not {method.queue_size}."
        )


def check_optim(optim: OptimConfig) -> None:
    """Raise a `UserError` for settings of the optimizer that do not suit each other."""
    if optim.nesterov and optim.name != "sgd":
        raise UserError(f"--optim.nesterov is for sgd; leave it out with --optim.name {optim.name}.")
    if optim.nesterov and optim.sgd_momentum == 0:
        raise UserError("--optim.nesterov needs momentum; choose --optim.sgd_momentum above 0.")
    for share in optim.milestones or ():
        if not 0 < share < 1:
            raise UserError(
                f"--optim.milestones are shares of the run, above 0 and below 1, such as [0.6,0.8], not {share:g}."
            )


def check_limits(sections: dict[str, Any], limits: dict[str, tuple[float, float]]) -> None:
    """Raise a `UserError` for a number out of its limits."""
    for name, (low, high) in limits.items():
        section, field = name.split(".")
        value = sections[section][field]
        if isinstance(value, int | float) and not low <= value <= high:  # a NaN is not within limits either
            bound = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise UserError(f"--{name} must be {bound}, not {value:g}.")
