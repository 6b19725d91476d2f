"""Crop and resize, each image with its own box: antialiased bilinear, as torchvision's `resized_crop`."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

#: On a CPU, views larger than this are resized one by one in uint8, smaller ones as matrix products.
_LARGE = 48


def resized_crop(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Crops of n images, resized to squares.

    Args:
        images: (n, 3, H, W) uint8; fastest with the strides of (n, H, W, 3) arrays.
        boxes: (n, 4) int64: top, left, height, width, within the image.
        size: Side of the result.

    Returns:
        (n, 3, size, size) float32 in [0, 1].
    """
    if images.device.type == "cpu" and size > _LARGE:
        crops = [
            F.interpolate(
                image[None, :, top : top + height, left : left + width],
                (size, size),
                mode="bilinear",
                antialias=True,
            )
            for image, (top, left, height, width) in zip(images, boxes.tolist(), strict=True)
        ]
        return to_float(torch.cat(crops))
    boxes = boxes.to(images.device)
    top, left, height, width = boxes.unbind(1)
    rows = _weights(top, height, images.shape[2], size)  # (n, size, H)
    columns = _weights(left, width, images.shape[3], size)  # (n, size, W)
    narrow = to_float(images).flatten(1, 2) @ columns.mT  # (n, 3H, size)
    return rows[:, None] @ narrow.view(len(images), 3, -1, size)


def resized_crop_one(image: np.ndarray, box: tuple[float, float, float, float], size: int) -> np.ndarray:
    """One crop of one (H, W, 3) uint8 image, resized to (size, size, 3) uint8.

    The box (top, left, height, width) may have fractions, as it has after a reduced-size decoding.
    """
    top, left, height, width = box
    y, x = int(top), int(left)
    crop = Image.fromarray(image[y : int(np.ceil(top + height)), x : int(np.ceil(left + width))])
    inside = (left - x, top - y, left - x + width, top - y + height)
    return np.asarray(crop.resize((size, size), Image.Resampling.BILINEAR, box=inside))


def to_float(images: Tensor) -> Tensor:
    """(n, 3, H, W) uint8 to contiguous float32 in [0, 1]."""
    return images.contiguous().float().mul_(1 / 255)


def _weights(start: Tensor, length: Tensor, extent: int, size: int) -> Tensor:
    """(n, size, extent) matrices that resize [start, start + length) of an axis to `size` samples.

    Each output weighs the inputs with a triangle around its own position, as wide as one output pixel
    (when shrinking) or one input pixel (when growing).
    """
    scale = (length / size)[:, None, None]
    at = start[:, None, None] + (torch.arange(size, device=start.device)[:, None] + 0.5) * scale - 0.5
    pixel = torch.arange(extent, device=start.device)
    weights = (1 - (pixel - at).abs() / scale.clamp(min=1)).clamp_(min=0)
    inside = (pixel >= start[:, None, None]) & (pixel < (start + length)[:, None, None])
    weights = weights * inside
    return weights / weights.sum(2, keepdim=True)
