"""Name -> encoder: a torchvision network with batch norm, without its classifier."""

import copy
import difflib
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from momentum2.config import Stem
from momentum2.errors import UserError

_STEMS: dict[Stem, tuple[int, int]] = {"cifar": (3, 1), "small": (3, 2)}  # kernel, stride; neither pools
#: What torchvision's files hold and an encoder does not: classifiers, also Inception's auxiliary ones.
_LEFT_OUT = ("fc.", "classifier.", "aux1.", "aux2.", "AuxLogits.")


class Encoder(nn.Module):
    """What `build` returns, for type checkers: images (n, 3, h, w) -> pooled features (n, feature_dim).

    At run time it is torchvision's own module with `feature_dim` set on it, so every parameter keeps
    torchvision's name.
    """

    feature_dim: int


def build(name: str, stem: Stem = "imagenet", width: float = 1.0) -> Encoder:
    """The torchvision network `name`, randomly initialised, ending in its pooled features.

    `stem` and `width` are for ResNets: the first layers (imagenet 7x7/2 and pooling, cifar 3x3/1, small
    3x3/2) and a multiplier of all channels.
    """
    network = _torchvision_network(name)
    if (stem, width) != ("imagenet", 1.0):
        _reshape_resnet(network, name, stem, width)
    for part in ("fc", "classifier", "dropout"):  # two families drop features before their classifier
        if hasattr(network, part):
            setattr(network, part, nn.Identity())
    if name.startswith("vgg"):  # its 7x7 pooling feeds a classifier of 120 million weights
        network.avgpool = nn.AdaptiveAvgPool2d(1)
    encoder = cast(Encoder, network)
    encoder.feature_dim = _feature_dim(network)
    return encoder


def _torchvision_network(name: str) -> nn.Module:
    from momentum2._torchvision import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else "try resnet18 or resnet50."
        raise UserError(f"torchvision has no backbone '{name}'; {hint}")
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}

    network = cast(nn.Module, torchvision.models.get_model(name, weights=None, **options))
    kinds = {type(module) for module in network.modules()}
    if nn.BatchNorm2d not in kinds or nn.LayerNorm in kinds:
        raise UserError(f"'{name}' is not a convolutional network with batch norm; try resnet50.")
    return network


def _reshape_resnet(network: Any, name: str, stem: Stem, width: float) -> None:
    """Give a ResNet other first layers and other channel counts, initialised as torchvision does."""
    from momentum2._torchvision import torchvision

    if not isinstance(network, torchvision.models.ResNet):
        raise UserError(f"Only ResNets have a stem and a width to choose; leave both out for '{name}'.")
    channels = int(64 * width)
    if channels != 64 * width or int(network.base_width * width) < 1:
        raise UserError(f"Width {width} does not give '{name}' whole channel counts; try 0.25, 0.5 or 2.")
    if stem in _STEMS:
        kernel, stride = _STEMS[stem]
        network.maxpool = nn.Identity()
    else:
        kernel, stride = 7, 2
    network.conv1 = nn.Conv2d(3, channels, kernel, stride, padding=kernel // 2, bias=False)
    new: list[nn.Module] = [network.conv1]
    if width != 1:
        network.bn1 = nn.BatchNorm2d(channels)
        network.inplanes = channels
        for i in range(4):
            old = getattr(network, f"layer{i + 1}")
            layer = network._make_layer(type(old[0]), channels * 2**i, len(old), stride=1 if i == 0 else 2)
            setattr(network, f"layer{i + 1}", layer)
            new.append(layer)
    for module in (m for part in new for m in part.modules()):
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _feature_dim(network: nn.Module) -> int:
    """Found on a copy without storage: no pixel is computed and no BN statistic moves."""
    shadow = copy.deepcopy(network).to("meta").eval()
    features: Tensor = shadow(torch.empty(1, 3, 299, 299, device="meta"))
    return features.shape[1]


def load_weights(encoder: nn.Module, path: str | Path) -> None:
    """Load a state dict (.safetensors, .pth) into the encoder, strictly by name and shape.

    A classifier in the file is left out. BN's `num_batches_tracked` may be missing, as it is in older files.
    """
    path = Path(path)
    state = {k: v for k, v in _read(path).items() if not k.startswith(_LEFT_OUT)}
    own = encoder.state_dict()
    problems = {
        "missing": [k for k in own.keys() - state.keys() if not k.endswith("num_batches_tracked")],
        "unknown": state.keys() - own.keys(),
        "of another shape": [k for k in own.keys() & state.keys() if own[k].shape != state[k].shape],
    }
    found = [f"{len(names)} {what} ({_some(names)})" for what, names in problems.items() if names]
    if found:
        raise UserError(f"The weights in {path} do not fit this backbone: {', '.join(found)}.")
    encoder.load_state_dict(own | state)


def _some(names: Any) -> str:
    first = sorted(names)
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"There is no weights file {path}.")
    try:
        # Without weights_only a .pth could run any code it likes.
        state = (
            load_file(path)
            if path.suffix == ".safetensors"
            else torch.load(path, map_location="cpu", weights_only=True)
        )
    except Exception as error:  # a damaged or foreign file raises nearly anything
        raise UserError(
            f"{path} is not a readable state dict of tensors (.safetensors, or .pth from torch.save)."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError(f"{path} is not a flat state dict; save the network's state_dict() itself.")
    return state
