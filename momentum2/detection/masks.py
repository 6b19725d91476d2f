"""Masks between an image and the square that the mask branch predicts for each box.

A pixel is a square here and its value lies in the middle of it, in both directions: what the branch learns and what is
pasted fit to a fraction of a pixel.
"""

from math import ceil, floor

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2._torchvision import torchvision


def mask_targets(
    masks: Tensor, boxes: Tensor, objects: Tensor, size: int, image_size: tuple[int, int]
) -> Tensor:
    """What the mask branch should predict for each box: the covered share of each bin, (n, size, size) in [0, 1].

    Args:
        masks: Those of an image's objects as they were annotated, bool (m, h, w).
        boxes: (n, 4) in the scaled image, whose (height, width) without padding is `image_size`.
        objects: The object of each box, int64 (n,).
        size: Bins along a side.
        image_size: See boxes.
    """
    height, width = image_size
    scale = boxes.new_tensor((masks.shape[2] / width, masks.shape[1] / height)).repeat(2)
    rois = torch.cat((objects[:, None].to(boxes), boxes * scale), 1)
    bins: Tensor = torchvision.ops.roi_align(masks[:, None].to(boxes), rois, size, aligned=True)
    return bins[:, 0]


def paste(probabilities: Tensor, boxes: Tensor, height: int, width: int) -> Tensor:
    """Predicted squares (n, m, m), each put into its box (n, 4) of the image: bool (n, height, width)."""
    result = torch.zeros(len(boxes), height, width, dtype=torch.bool, device=boxes.device)
    for i, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        left, right = max(floor(x1), 0), min(ceil(x2), width)
        top, bottom = max(floor(y1), 0), min(ceil(y2), height)
        if left >= right or top >= bottom or x2 <= x1 or y2 <= y1:
            continue
        # Where the middle of each pixel lies in the box, from -1 to 1.
        x = (torch.arange(left, right, device=boxes.device) + 0.5 - x1) / (x2 - x1) * 2 - 1
        y = (torch.arange(top, bottom, device=boxes.device) + 0.5 - y1) / (y2 - y1) * 2 - 1
        grid = torch.stack(torch.broadcast_tensors(x[None], y[:, None]), -1)[None]
        values = F.grid_sample(probabilities[i][None, None], grid, align_corners=False)[0, 0]
        result[i, top:bottom, left:right] = values >= 0.5
    return result
