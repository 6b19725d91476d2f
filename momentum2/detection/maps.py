"""The door between an encoder and a feature pyramid: maps, their channels and their strides."""

import copy
from abc import abstractmethod

import torch
from torch import Tensor, nn

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


def maps_of(encoder: nn.Module) -> Maps:
    """The maps of an encoder, or a sentence that says why it has none."""
    if isinstance(encoder, Maps):
        return encoder
    if all(hasattr(encoder, f"layer{i}") for i in (1, 2, 3, 4)):
        return ResNetMaps(encoder)
    raise UserError("Detectors are built on ResNets. Choose a run whose backbone is one.")
