"""Settings that cannot work, refused in one sentence before anything is opened or written."""

from typing import get_args

from momentum2.augment import Normalization, view_specs
from momentum2.backbones import Facts, published
from momentum2.config import OWN, Config, OptimConfig, ViewRecipe, ViewsConfig
from momentum2.data.looking import reading_of
from momentum2.data.remote import check_url
from momentum2.errors import SettingError
from momentum2.methods import METHODS, Method
from momentum2.optim import READ_BY
from momentum2.settings import check as check_settings


def method_class(config: Config, own: type[Method] | None = None) -> type[Method]:
    """The class of the method that `config` names, or the one that was given from Python."""
    if own is not None:
        return own
    if config.method.name == OWN:
        raise SettingError(
            "method.name",
            "own is only for a custom class, which can only be passed from Python: pretrain(method=).",
        )
    return METHODS[config.method.name]


def number_of_views(config: Config) -> int:
    """How many views of an image there are."""
    return len(view_specs(config.views, config.data.image_size, Normalization.of(config.data)))


def check(config: Config, kind: type[Method]) -> None:
    """Raise a `UserError` for a value out of its limits, or for settings that do not suit the method."""
    check_settings(config)
    if config.train.batch_size < 2:
        raise SettingError("train.batch_size", f"must be at least 2, not {config.train.batch_size}.")
    check_optim(config.optim)
    method, name = config.method, kind.__name__
    views = number_of_views(config)
    reading_of(config.data)
    check_url(config.data.root)
    check_url(config.eval_data.root, "eval_data.root")
    if config.eval_data.name != "none" and config.eval_data.channels != config.data.channels:
        raise SettingError(
            "eval_data.channels",
            f"is {config.eval_data.channels}, but the network is trained on {config.data.channels} channels.",
        )
    if views not in kind.views:
        one = len(kind.views) == 1
        wanted = (
            f"{kind.views[0]} view{'s' * (kind.views[0] > 1)}" if one else f"at least {kind.views[0]} views"
        )
        once = views // config.views.repeat
        if config.views.repeat > 1 and once in kind.views:
            raise SettingError(
                "views.repeat",
                f"is {config.views.repeat}, which makes {views} views per image, but {name} takes {wanted}. Set it to "
                "1.",
            )
        raise SettingError(
            "views.recipe",
            f"{config.views.recipe} makes {once} view{'s' * (once > 1)} per image, but {name} takes {wanted}. Use "
            f"{_recipe_with(kind.views)}.",
        )
    if kind.has_teacher and method.teacher_norm not in kind.teacher_norms:
        raise SettingError(
            "method.teacher_norm",
            f"{method.teacher_norm} does not work with {name}. Use {', '.join(sorted(kind.teacher_norms))}.",
        )
    if method.export == "teacher" and not kind.has_teacher:
        raise SettingError("method.export", f"cannot be teacher: {name} has none. Leave it out.")
    if method.freeze_encoder and not kind.can_freeze:
        raise SettingError(
            "method.freeze_encoder", f"does not work with {name}, which trains its encoder. Leave it out."
        )
    kind.check(config)


def _recipe_with(views: range) -> ViewRecipe:
    """The first recipe that makes such a number of views; that of any number otherwise."""
    recipes: tuple[ViewRecipe, ...] = get_args(ViewRecipe)
    return next((r for r in recipes if len(view_specs(ViewsConfig(r), 224)) in views), "multicrop")


def check_encoder(config: Config, encoder: Facts) -> None:
    """Raise a `UserError` for settings that do not suit the network."""
    name = encoder.architecture.backbone
    if config.model.pretrained:
        if config.model.weights:
            raise SettingError("model.weights", "and model.pretrained cannot both be set. Choose one.")
        published.describe(name)
    if config.train.recompute and encoder.batch_norms:
        raise SettingError(
            "train.recompute", f"would count the statistics of {name}'s batch norms twice. Leave it out."
        )
    if config.train.recompute and not encoder.recomputes:
        raise SettingError("train.recompute", f"does not work with {name}. Leave it out.")
    if config.optim.layer_decay is not None and not encoder.layered:
        raise SettingError(
            "optim.layer_decay",
            f"is only for timm networks, which say what their layers are, not {name}. Leave it out.",
        )


def check_optim(optim: OptimConfig) -> None:
    """Raise a `UserError` for settings of the optimizer that do not suit each other."""
    for name, chosen in (
        ("nesterov", optim.nesterov),
        ("weight_decay_end", optim.weight_decay_end is not None),
    ):
        if chosen and optim.name not in READ_BY[name]:
            suits = " and ".join(READ_BY[name])
            raise SettingError(f"optim.{name}", f"is only for {suits}, not {optim.name}. Leave it out.")
    if optim.nesterov and optim.sgd_momentum == 0:
        raise SettingError("optim.nesterov", "needs momentum. Set optim.sgd_momentum above 0.")
    for share in optim.milestones or ():
        if not 0 < share < 1:
            raise SettingError(
                "optim.milestones",
                f"must be shares of the run, above 0 and below 1, such as [0.6,0.8], not {share:g}.",
            )
