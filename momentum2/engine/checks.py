"""Settings that cannot be meant, said in one sentence before anything is opened or written."""

from momentum2.augment import view_specs
from momentum2.config import Config
from momentum2.errors import SettingError, UserError
from momentum2.settings import check as check_settings


def check(config: Config) -> None:
    """Raise a `UserError` for a value out of its limits, or for views that do not suit the method."""
    check_settings(config)
    if config.train.batch_size < 2:
        raise SettingError("train.batch_size", f"must be at least 2, not {config.train.batch_size}.")
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
    if method.name == "moco" and method.queue_size < config.train.batch_size:
        raise UserError(
            f"--method.queue_size must be at least the batch size, {config.train.batch_size}, not {method.queue_size}."
        )
