"""torchvision's networks without their classifiers, and what can be chosen about its ResNets."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from momentum2.config import Stem, StemInit
from momentum2.errors import SettingError, UserError

_STEMS: dict[Stem, tuple[int, int]] = {"cifar": (3, 1), "small": (3, 2)}  # kernel, stride; neither pools
#: Arguments that the package gives itself, or that would fetch something.
RESERVED = ("weights", "weights_backbone", "num_classes", "progress", "pretrained")


def names() -> list[str]:
    """The networks for whole images that torchvision has, and resnet10, which its class makes but has no name for."""
    from momentum2._torchvision import torchvision

    return [*torchvision.models.list_models(module=torchvision.models), "resnet10"]


def create(
    name: str,
    stem: Stem,
    width: float,
    zero_init_residual: bool,
    stem_init: StemInit,
    channels: int,
    options: Mapping[str, Any],
) -> nn.Module:
    """The network `name`, randomly initialized, ending in its pooled features."""
    from momentum2._torchvision import torchvision

    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True, **options}
    resnet = torchvision.models.resnet
    network: nn.Module
    if name == "resnet10":  # ResNet-18 with one block a stage
        network = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], **options)
    else:
        network = torchvision.models.get_model(name, weights=None, **options)
    if (stem, width) != ("imagenet", 1.0):
        _reshape_resnet(network, name, stem, width)
    if zero_init_residual:
        _zero_residual(network, name)
    if stem_init == "cosines":
        _start_with_cosines(network, name)
    _take_off_classifier(network)
    if name.startswith("vgg"):  # its 7x7 pooling feeds a classifier of 120 million weights
        network.avgpool = nn.AdaptiveAvgPool2d(1)
    if channels != 3:
        _take_channels(network, channels)
    return network


def is_resnet(network: nn.Module) -> bool:
    from momentum2._torchvision import torchvision

    return isinstance(network, torchvision.models.ResNet)


def _take_off_classifier(network: nn.Module) -> None:
    for part in (
        "fc",
        "classifier",
        "dropout",
        "head",
        "heads",
    ):  # some drop features before their classifier
        old = getattr(network, part, None)
        if isinstance(old, nn.Sequential) and any(isinstance(layer, nn.Flatten) for layer in old):
            # It pools and normalizes too, and only its last layer knows classes.
            old[len(old) - 1] = nn.Identity()
        elif old is not None:
            setattr(network, part, nn.Identity())


def _take_channels(network: nn.Module, channels: int) -> None:
    """Give the first convolution another number of input channels, initialized as torch does."""
    name, first = next((n, m) for n, m in network.named_modules() if isinstance(m, nn.Conv2d))
    new = nn.Conv2d(
        channels,
        first.out_channels,
        cast(tuple[int, int], first.kernel_size),
        cast(tuple[int, int], first.stride),
        cast(tuple[int, int], first.padding),
        bias=first.bias is not None,
    )
    if is_resnet(network):
        nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    network.set_submodule(name, new)


def _reshape_resnet(network: Any, name: str, stem: Stem, width: float) -> None:
    """Give a ResNet other first layers and other channel counts, initialized as torchvision does."""
    if not is_resnet(network):
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


def _zero_residual(network: nn.Module, name: str) -> None:
    """As torchvision's `zero_init_residual`, for its own layers and for reshaped ones."""
    from momentum2._torchvision import torchvision

    resnet = torchvision.models.resnet
    if not is_resnet(network):
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
    if not is_resnet(network):
        raise SettingError("model.stem_init", f"is only for ResNets, not '{name}'. Leave it out.")
    weight = network.get_parameter("conv1.weight")
    with torch.no_grad():
        start = cosine_filters(len(weight) // 2, weight.shape[-1]).to(weight.device)
        weight[: 2 * len(start)] = torch.cat([start, -start])
