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
    return max(int(height * scale + 0.5), 1), max(int(width * scale + 0.5), 1)


def resize(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Image (3, h, w) in [0, 1] at another size; the same one in training and in evaluation."""
    resized = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)
    return resized[0].clamp(0, 1)


def resize_boxes(boxes: Tensor, before: tuple[int, int], after: tuple[int, int]) -> Tensor:
    """Boxes (n, 4) of an image whose (height, width) changes."""
    return boxes * boxes.new_tensor((after[1] / before[1], after[0] / before[0])).repeat(2)


def flip(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Left becomes right."""
    x1, y1, x2, y2 = target["boxes"].unbind(1)
    width = image.shape[2]
    target = {**target, "boxes": torch.stack((width - x2, y1, width - x1, y2), 1)}
    if "masks" in target:
        target["masks"] = target["masks"].flip(2)
    return image.flip(2), target


def training_view(image: Tensor, target: Target, change: Draw, max_long_edge: int) -> tuple[Tensor, Target]:
    """uint8 (3, h, w) to float in [0, 1], scaled and perhaps flipped, with its objects.

    Masks keep the size that they were annotated at.
    """
    _, height, width = image.shape
    size = scaled_size(height, width, change.short_edge, max_long_edge)
    scaled = resize(image.float() / 255, size)
    target = {**target, "boxes": resize_boxes(target["boxes"], (height, width), size)}
    return flip(scaled, target) if change.flip else (scaled, target)
