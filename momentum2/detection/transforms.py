"""Scale and flip of one image with its objects: pure functions, their draws made from (seed, step, place)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.detection.presets import DetectionDataConfig
from momentum2.detection.targets import Target
from momentum2.seeds import uniform


class Draw(NamedTuple):
    """How one image is changed."""

    short_edge: int
    flip: bool


def draw(config: DetectionDataConfig, seed: int, step: int, place: int) -> Draw:
    """The change of the image at `place` of the global batch of `step`: the same in every number of processes."""
    edge, coin = (uniform(seed, "detection", what, step, place) for what in ("edge", "flip"))
    return Draw(config.short_edges[int(edge * len(config.short_edges))], coin < config.flip)


def scaled_size(height: int, width: int, short_edge: int, max_long_edge: int) -> tuple[int, int]:
    """(height, width) with the short edge of that length, or less if the long edge would be too long."""
    scale = min(short_edge / min(height, width), max_long_edge / max(height, width))
    return max(round(height * scale), 1), max(round(width * scale), 1)


def resize(image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    """Image (3, h, w) in [0, 1] and its objects, at another size."""
    height, width = image.shape[1:]
    image = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0].clamp(
        0, 1
    )
    scale = torch.tensor((size[1] / width, size[0] / height)).repeat(2)
    target = {**target, "boxes": target["boxes"] * scale}
    if "masks" in target:
        masks = F.interpolate(target["masks"][None].to(torch.uint8), size, mode="nearest-exact")
        target["masks"] = masks[0].bool()
    return image, target


def flip(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Left becomes right."""
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    width = image.shape[2]
    target = {**target, "boxes": torch.stack((width - x2, y1, width - x1, y2), 1)}
    if "masks" in target:
        target["masks"] = target["masks"].flip(2)
    return image.flip(2), target


def training_view(image: Tensor, target: Target, change: Draw, max_long_edge: int) -> tuple[Tensor, Target]:
    """uint8 (3, h, w) to float in [0, 1], scaled and perhaps flipped, with its objects."""
    _, height, width = image.shape
    size = scaled_size(height, width, change.short_edge, max_long_edge)
    scaled, target = resize(image.float() / 255, target, size)
    return flip(scaled, target) if change.flip else (scaled, target)
