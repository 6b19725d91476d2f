"""RoIAlign on a feature pyramid."""

import torch
from torch import Tensor, nn

from momentum2._torchvision import torchvision

_CANONICAL_SIZE, _CANONICAL_STRIDE = 224, 16  # a box of this side is pooled at this stride


class Pool(nn.Module):
    """Boxes to squares of features, each from the level of its size.

    Aligned: the value of a cell lies in the middle of its pixels. Without that, which is torchvision's
    `MultiScaleRoIAlign`, everything is off by half a stride.

    Args:
        strides: Of the levels to pool from, each twice the one before.
        size: Bins along a side.
        samples: Points per bin along a side; 0 for one per cell.
    """

    def __init__(self, strides: list[int], size: int, samples: int) -> None:
        super().__init__()
        self.strides, self.size, self.samples = strides, size, samples

    def forward(self, maps: list[Tensor], boxes: list[Tensor]) -> Tensor:
        """Levels (n, c, h, w) and the boxes of each image (k, 4) to (Σ k, c, size, size)."""
        # Image, x1, y1, x2, y2.
        rois = torch.cat([torch.cat((b.new_full((len(b), 1), i), b), 1) for i, b in enumerate(boxes)])
        level = self.levels(rois[:, 1:])
        pooled = maps[0].new_zeros(len(rois), maps[0].shape[1], self.size, self.size)
        for i, stride in enumerate(self.strides):
            chosen = (level == i).nonzero()[:, 0]
            part = torchvision.ops.roi_align(
                maps[i], rois[chosen], self.size, 1 / stride, self.samples, aligned=True
            )
            pooled = pooled.index_copy(0, chosen, part)
        return pooled

    def levels(self, boxes: Tensor) -> Tensor:
        """The level of each box (n, 4): int64 (n,)."""
        side = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1).sqrt()
        steps = torch.log2(side / _CANONICAL_SIZE * (_CANONICAL_STRIDE / self.strides[0]) + 1e-8)
        return torch.floor(steps + 1e-6).clamp(0, len(self.strides) - 1).long()
