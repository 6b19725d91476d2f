"""Crop and resize, each image with its own box: antialiased bilinear, as torchvision's `resized_crop`."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

#: On a CPU, views larger than this are resized one by one in uint8, smaller ones as matrix products.
_LARGE = 48


def resized_crop(
    images: Tensor, boxes: Tensor, size: int, flip: Tensor | None = None, index: Tensor | None = None
) -> Tensor:
    """Crops of images, resized to squares.

    Args:
        images: (N, 3, H, W) uint8; fastest with the strides of (N, H, W, 3) arrays.
        boxes: (n, 4) int64: top, left, height, width, within the image.
        size: Side of the result.
        flip: (n,) bool, crops to mirror left to right.
        index: (n,) int64, the image that each crop is cut from; by default crop i from image i.

    Returns:
        (n, 3, size, size) float32 in [0, 1].
    """
    flip = torch.zeros(len(boxes), dtype=torch.bool) if flip is None else flip
    index = torch.arange(len(boxes)) if index is None else index
    if images.device.type == "cpu" and size > _LARGE:
        return to_float(_one_by_one(images, boxes, size, flip, index))
    boxes, flip, index = (on(images.device, x) for x in (boxes, flip, index))
    top, left, height, width = boxes.unbind(1)
    rows = _weights(top, height, images.shape[2], size, torch.zeros_like(flip))
    columns = _weights(left, width, images.shape[3], size, flip)
    narrow = to_float(images.index_select(0, index)).flatten(1, 2) @ columns.mT  # (n, 3H, size)
    return rows[:, None] @ narrow.view(len(index), 3, -1, size)


def resized_crop_one(image: np.ndarray, box: Sequence[float], size: int) -> np.ndarray:
    """One crop of one (H, W, 3) uint8 image, resized to (size, size, 3) uint8.

    The box (top, left, height, width) may have fractions, as it has after a reduced-size decoding.
    """
    top, left, height, width = box
    y, x = int(top), int(left)
    crop = image[y : math.ceil(top + height), x : math.ceil(left + width)]
    if crop.shape[:2] == (height, width):
        pixels = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None]  # a copy: torch wants writable memory
        return _resize(pixels, size)[0].permute(1, 2, 0).numpy()
    # Pillow is slower, but its boxes may have fractions.
    inside = (left - x, top - y, min(left - x + width, crop.shape[1]), min(top - y + height, crop.shape[0]))
    return np.asarray(Image.fromarray(crop).resize((size, size), Image.Resampling.BILINEAR, box=inside))


def on(device: torch.device, values: Tensor) -> Tensor:
    """A few numbers of the CPU, on the device; CUDA is not waited for."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)  # torch keeps pinned memory for the next


def to_float(images: Tensor) -> Tensor:
    """(n, 3, H, W) uint8 to contiguous float32 in [0, 1]."""
    return images.contiguous().float().mul_(1 / 255)


def _one_by_one(images: Tensor, boxes: Tensor, size: int, flip: Tensor, index: Tensor) -> Tensor:
    """The crops as uint8: for large images torch's own resize of single ones is the fastest on a CPU."""
    crops = []
    for i, mirrored, (top, left, height, width) in zip(
        index.tolist(), flip.tolist(), boxes.tolist(), strict=True
    ):
        crop = images[i : i + 1, :, top : top + height, left : left + width]
        crop = crop.flip(3) if mirrored else crop
        crops.append(_resize(crop, size))
    return torch.cat(crops)


def _resize(image: Tensor, size: int) -> Tensor:
    return F.interpolate(image, (size, size), mode="bilinear", antialias=True)


def _weights(start: Tensor, length: Tensor, extent: int, size: int, flip: Tensor) -> Tensor:
    """(n, size, extent) matrices that resize [start, start + length) of an axis to `size` samples.

    Each output weighs the inputs with a triangle around its own position, as wide as one output pixel
    (when shrinking) or one input pixel (when growing), and cut off at the ends of the crop.
    """
    start, length = start[:, None, None].float(), length[:, None, None].float()
    flip = flip[:, None, None]
    output = torch.arange(size, device=start.device, dtype=torch.float32)[:, None] + 0.5
    pixel = torch.arange(extent, device=start.device, dtype=torch.float32)
    scale = length / size
    center = torch.where(flip, start + length - output * scale, start + output * scale) - 0.5  # (n, size, 1)
    outside = (pixel < start) | (pixel >= start + length)
    peak = outside.float().mul_(-1e9).add_(1)  # (n, 1, extent); not `where`, for which CUDA has to be waited
    weights = (pixel - center).abs_().div_(-scale.clamp(min=1)).add_(peak).clamp_(min=0)
    return weights.div_(weights.sum(2, keepdim=True))
