"""Settings that cannot be meant, said in one sentence before anything is opened or written."""

from momentum2.augment import view_specs
from momentum2.config import Config, OptimConfig
from momentum2.errors import SettingError, UserError
from momentum2.settings import check as check_settings

#: The methods that have a teacher.
WITH_TEACHER = frozenset({"byol", "moco"})


def check(config: Config) -> None:
    """Raise a `UserError` for a value out of its limits, or for views that do not suit the method."""
    check_settings(config)
    if config.train.batch_size < 2:
        raise SettingError("train.batch_size", f"must be at least 2, not {config.train.batch_size}.")
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
