"""Name -> encoder: a torchvision network with batch norm, without its classifier."""

import copy
import difflib
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from momentum2.config import ModelConfig, Stem, StemInit
from momentum2.errors import SettingError, UserError
from momentum2.weights import fill, network_in, read_state

_STEMS: dict[Stem, tuple[int, int]] = {"cifar": (3, 1), "small": (3, 2)}  # kernel, stride; neither pools


class Encoder(nn.Module):
    """What `build` returns, for type checkers: images (n, channels, h, w) -> pooled features (n, feature_dim).

    At run time it is torchvision's own module with `feature_dim` set on it, so every parameter keeps
    torchvision's name.
    """

    feature_dim: int


def build(
    name: str,
    stem: Stem = "imagenet",
    width: float = 1.0,
    zero_init_residual: bool = False,
    stem_init: StemInit = "random",
    channels: int = 3,
) -> Encoder:
    """The torchvision network `name`, randomly initialized, ending in its pooled features.

    `stem` and `width` are for ResNets: the first layers (imagenet 7x7/2 and pooling, cifar 3x3/1, small
    3x3/2) and a multiplier of all channels. So is `zero_init_residual`: the last BN weight of every block is 0,
    and the network starts as one without residual branches. With `stem_init` "cosines" the first layer starts as
    `cosine_filters`. `channels` are those of the images.
    """
    network = _torchvision_network(name)
    if (stem, width) != ("imagenet", 1.0):
        _reshape_resnet(network, name, stem, width)
    if channels != 3:
        _widen_input(network, channels)
    if zero_init_residual:
        _zero_residual(network, name)
    if stem_init == "cosines":
        _start_with_cosines(network, name)
    for part in ("fc", "classifier", "dropout"):  # two families drop features before their classifier
        if hasattr(network, part):
            setattr(network, part, nn.Identity())
    if name.startswith("vgg"):  # its 7x7 pooling feeds a classifier of 120 million weights
        network.avgpool = nn.AdaptiveAvgPool2d(1)
    encoder = cast(Encoder, network)
    encoder.feature_dim = _feature_dim(network, channels)
    return encoder


def of_config(model: ModelConfig, channels: int = 3) -> Encoder:
    """The network of these settings, with initial weights, for images of so many channels."""
    return build(model.backbone, model.stem, model.width, model.zero_init_residual, model.stem_init, channels)


def with_feature_dim(network: nn.Module, image_size: int, channels: int = 3) -> Encoder:
    """Any network as an encoder: what it makes of an image must be one row of features.

    Images are (n, channels, image_size, image_size). A network without `feature_dim` is measured, without computing.
    """
    encoder = cast(Encoder, network)
    if not hasattr(network, "feature_dim"):
        encoder.feature_dim = _feature_dim(network, channels, image_size)
    return encoder


def _torchvision_network(name: str) -> nn.Module:
    from momentum2._torchvision import torchvision

    if name == "resnet10":  # a ResNet-18 with one block a stage, for which torchvision has no name
        resnet = torchvision.models.resnet
        return cast(nn.Module, resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1]))
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}?" if close else "Try resnet18 or resnet50."
        raise UserError(f"torchvision has no backbone '{name}'. {hint}")
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}

    device = torch.get_default_device()
    # A RegNet's widths are the outcome of tensor arithmetic, which the meta device cannot do.
    with torch.device("cpu" if name.startswith("regnet") else device):
        network = cast(nn.Module, torchvision.models.get_model(name, weights=None, **options)).to(device)
    kinds = {type(module) for module in network.modules()}
    if nn.BatchNorm2d not in kinds or nn.LayerNorm in kinds:
        raise UserError(f"'{name}' is not a convolutional network with batch norm. Try resnet50.")
    return network


def _reshape_resnet(network: Any, name: str, stem: Stem, width: float) -> None:
    """Give a ResNet other first layers and other channel counts, initialized as torchvision does."""
    from momentum2._torchvision import torchvision

    if not isinstance(network, torchvision.models.ResNet):
        raise UserError(f"Only ResNets have a stem and a width to choose. Leave both out for '{name}'.")
    channels = int(64 * width)
    if channels != 64 * width or int(network.base_width * width) < 1:
        raise UserError(f"Width {width} does not give '{name}' whole channel counts. Try 0.25, 0.5 or 2.")
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


def _widen_input(network: nn.Module, channels: int) -> None:
    """Let the first convolution take another number of channels, initialized as torchvision does."""
    name, first = next((n, m) for n, m in network.named_modules() if isinstance(m, nn.Conv2d))
    padding = cast(tuple[int, int], first.padding)
    kernel, stride = cast(tuple[int, int], first.kernel_size), cast(tuple[int, int], first.stride)
    new = nn.Conv2d(channels, first.out_channels, kernel, stride, padding, bias=first.bias is not None)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, new)


def _zero_residual(network: nn.Module, name: str) -> None:
    """As torchvision's `zero_init_residual`, for its own layers and for reshaped ones."""
    from momentum2._torchvision import torchvision

    resnet = torchvision.models.resnet
    if not isinstance(network, resnet.ResNet):
        raise SettingError("model.zero_init_residual", f"is only for ResNets, not '{name}'. Leave it out.")
    for block in network.modules():
        if isinstance(block, resnet.Bottleneck):
            nn.init.zeros_(block.bn3.weight)
        elif isinstance(block, resnet.BasicBlock):
            nn.init.zeros_(block.bn2.weight)


def cosine_filters(count: int, side: int) -> Tensor:
    """The first `count` filters (count×3×side×side) of a basis in which natural images are nearly uncorrelated.

    Each is a cosine along y, one along x, and a direction of color (light, blue to yellow, red to green), all of unit
    length. They come in the order of their variance in images, about color / (1 + frequency)². The batch norm behind
    them gives all the same variance, so a network starts with whitened patches.
    """
    places = torch.arange(side) + 0.5
    waves = torch.stack([torch.cos(torch.pi * places * u / side) for u in range(side)])
    colors = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
    waves, colors = (x / x.norm(dim=1, keepdim=True) for x in (waves, colors))
    basis = [
        (variance / (1 + u + v) ** 2, torch.einsum("c,y,x->cyx", color, waves[u], waves[v]))
        for variance, color in zip((1.0, 0.2, 0.05), colors, strict=True)
        for u in range(side)
        for v in range(side)
    ]
    basis.sort(key=lambda pair: -pair[0])
    return torch.stack([wave for _, wave in basis[:count]])


def _start_with_cosines(network: nn.Module, name: str) -> None:
    """Half of the first layer's filters are cosines and half their negatives, since ReLU cuts off one sign of each."""
    from momentum2._torchvision import torchvision

    if not isinstance(network, torchvision.models.ResNet):
        raise SettingError("model.stem_init", f"is only for ResNets, not '{name}'. Leave it out.")
    weight = network.conv1.weight
    with torch.no_grad():
        start = cosine_filters(len(weight) // 2, weight.shape[-1]).to(weight.device)
        weight[: 2 * len(start)] = torch.cat([start, -start])


def _feature_dim(network: nn.Module, channels: int, size: int = 299) -> int:
    """Found on a copy without storage: no pixel is computed and no BN statistic moves."""
    shadow = copy.deepcopy(network).to("meta").eval()
    features: Tensor = shadow(torch.empty(1, channels, size, size, device="meta"))
    if not isinstance(features, Tensor) or features.dim() != 2:
        found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UserError(
            f"An encoder must return one row of features per image, (n, d); {type(network).__name__} returns {found}."
        )
    return features.shape[1]


def load_weights(encoder: nn.Module, path: str | Path) -> None:
    """Load a state dict (.safetensors, .pth) into the encoder, strictly by name and shape.

    Prefixes of wrappers are taken off, and a classifier in the file is left out.
    """
    path = Path(path)
    fill(encoder, network_in(read_state(path), encoder.state_dict(), path), path)
