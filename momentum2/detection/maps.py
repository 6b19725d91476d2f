"""The door between an encoder and a feature pyramid: maps, their channels and their strides."""

import copy
import itertools
from abc import abstractmethod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2.backbones.fit import in_words
from momentum2.errors import UserError

_SIDE = 128  # of the image that is used to find channels and strides


class Maps(nn.Module):
    """All that a pyramid knows about an encoder: images (n, 3, h, w) to maps, finest first.

    To build detectors on another family of networks, write a subclass and return it from `maps_of`. Its parameters
    should have the names that they have in the encoder, and all of them should take part in the last map: what does not
    gets no gradient, which several processes cannot train. A batch norm in it will be synced.

    Attributes:
        channels: Channels of each map.
        strides: Pixels of the image per cell, of each map: powers of two, each twice the one before. R-CNNs take the
            last four maps (4, 8, 16 and 32 as published), RetinaNet and FCOS the last three.
    """

    channels: tuple[int, ...]
    strides: tuple[int, ...]

    @abstractmethod
    def forward(self, images: Tensor) -> list[Tensor]:
        """Map i is (n, channels[i], h / strides[i], w / strides[i]), rounded up."""

    def measure(self) -> None:
        """Set `channels` and `strides`. Found on a copy without storage: no pixel is computed."""
        shadow = copy.deepcopy(self).to("meta").eval()
        maps = shadow(torch.empty(1, 3, _SIDE, _SIDE, device="meta"))
        self.channels = tuple(m.shape[1] for m in maps)
        self.strides = tuple(_SIDE // m.shape[2] for m in maps)


class ResNetMaps(Maps):
    """The outputs of the four stages of a ResNet, which keep their names."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        for name, part in encoder.named_children():
            self.add_module(name, part)
            if name == "layer4":  # what follows pools and classifies
                break
        self.measure()

    def forward(self, images: Tensor) -> list[Tensor]:
        maps, x = [], images
        for name, part in self.named_children():
            x = part(x)
            if name.startswith("layer"):
                maps.append(x)
        return maps


class StageMaps(Maps):
    """The last map of each stride of a network of timm, which stays whole and keeps its names below `encoder`.

    A network says of itself where its maps are (`feature_info`), and most can be asked for them
    (`forward_intermediates`); of the others they are taken on the way.
    """

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        info = cast(Any, encoder).feature_info
        last = {stage["reduction"]: i for i, stage in enumerate(info)}  # the deepest of each stride
        self.chosen = [last[stride] for stride in sorted(last) if stride >= 4]
        self.modules_of = [str(info[i]["module"]) for i in self.chosen]
        self.measure()
        _freeze_unused(self)

    def forward(self, images: Tensor) -> list[Tensor]:
        encoder: Any = self.encoder
        if hasattr(encoder, "forward_intermediates"):
            return list(encoder.forward_intermediates(images, indices=self.chosen, intermediates_only=True))
        found: dict[str, Tensor] = {}
        hooks = [
            encoder.get_submodule(name).register_forward_hook(
                lambda module, inputs, output, name=name: found.__setitem__(name, output)
            )
            for name in self.modules_of
        ]
        try:
            encoder.forward_features(images)
        finally:
            for hook in hooks:
                hook.remove()
        return [found[name] for name in self.modules_of]


class PlainMaps(Maps):
    """The one map of a plain ViT at four strides: upsampled by 4 and 2, as it is, and pooled (Li et al., 2022)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        width = int(cast(Any, encoder).feature_info[-1]["num_chs"])
        self.finest = nn.Sequential(
            nn.ConvTranspose2d(width, width, 2, 2),
            nn.GroupNorm(1, width),
            nn.GELU(),
            nn.ConvTranspose2d(width, width, 2, 2),
        )
        self.finer = nn.ConvTranspose2d(width, width, 2, 2)
        self.measure()
        _freeze_unused(self)

    def forward(self, images: Tensor) -> list[Tensor]:
        (x,) = cast(Any, self.encoder).forward_intermediates(
            images, indices=1, norm=True, intermediates_only=True
        )
        return [self.finest(x), self.finer(x), x, F.max_pool2d(x, 2)]


def _freeze_unused(maps: Maps) -> None:
    """What comes after the last map, such as a norm before a classifier, gets no gradient: several processes would
    wait for it."""
    shadow = copy.deepcopy(maps).to("meta").train()
    torch.stack([m.sum() for m in shadow(torch.empty(2, 3, _SIDE, _SIDE, device="meta"))]).sum().backward()
    used = {name for name, p in shadow.named_parameters() if p.grad is not None}
    for name, parameter in maps.named_parameters():
        if name not in used:
            parameter.requires_grad_(False)


def maps_of(encoder: nn.Module) -> Maps:
    """The maps of an encoder, or a sentence that says why it has none."""
    if isinstance(encoder, Maps):
        return encoder
    name = type(encoder).__name__
    info = getattr(encoder, "feature_info", None)
    if not isinstance(info, list) and all(hasattr(encoder, f"layer{i}") for i in (1, 2, 3, 4)):
        return ResNetMaps(encoder)
    strides = sorted({stage["reduction"] for stage in info}) if isinstance(info, list) else []
    plain = len(strides) == 1 and strides[0] >= 4 and hasattr(encoder, "forward_intermediates")
    if not plain and len([stride for stride in strides if stride >= 4]) < 3:
        raise UserError(
            f"{name} has no maps of several strides for a detector. Choose a run of another backbone."
        )
    try:
        maps = PlainMaps(encoder) if plain else StageMaps(encoder)
    except (AssertionError, RuntimeError) as error:  # of images that are not of its size
        raise UserError(f"{name} does not take images of every size ({in_words(error)}).") from None
    ratios = {b / a for a, b in itertools.pairwise(maps.strides)}
    if ratios != {2.0} or maps.strides[0] & (maps.strides[0] - 1):
        told = ", ".join(map(str, maps.strides))
        raise UserError(
            f"Detectors need maps whose strides are powers of two, but those of {name} are {told}."
        )
    return maps
