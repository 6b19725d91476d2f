"""timm's networks without their classifiers. timm is imported here, when one of its networks is named."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from momentum2.errors import UserError

#: Arguments that the package gives itself, or that would fetch or open something.
RESERVED = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_strict",
    "checkpoint_path",
    "cache_dir",
    "num_classes",
    "in_chans",
    "features_only",
    "scriptable",
    "exportable",
    "no_jit",
)


def timm() -> Any:
    """The library, which needs our way to load torchvision."""
    import momentum2._torchvision  # noqa: F401

    try:
        import timm as library
    except ImportError:
        raise UserError("timm is not installed. Run pip install 'momentum2[timm]'.") from None
    return library


def names() -> list[str]:
    """Its architectures, without the tags of published weights."""
    return list(timm().list_models())


def layer_groups(network: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Its groups of `params` with their `lr_scale`: 1 for the last layer, `decay` times as much for each before."""
    timm()
    from timm.optim._param_groups import param_groups_layer_decay

    return list(param_groups_layer_decay(network, layer_decay=decay))


@functools.cache
def tagged_names() -> frozenset[str]:
    """The names of published weights, ARCHITECTURE.TAG."""
    return frozenset(timm().list_models(pretrained=True))


def create(name: str, channels: int, options: Mapping[str, Any]) -> nn.Module:
    """The network `name`, ARCHITECTURE or ARCHITECTURE.TAG, randomly initialized, ending in its pooled features."""
    with warnings.catch_warnings():
        # A head of no classes; the features say whether that is all that is left.
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        network = timm().create_model(name, pretrained=False, num_classes=0, in_chans=channels, **options)
    return cast(nn.Module, network)
