"""torchvision, also beside a torch it was not compiled for: `from momentum2._torchvision import torchvision`.

PyPI's Linux wheel of torchvision is a CUDA build. Next to a CPU-only torch its compiled operators cannot be
loaded and `import torchvision` fails. Where torchvision loads, this module does nothing. Elsewhere `_importing`
has it declare the operators the import asks for and supply CPU `nms` and `roi_align` written in torch, so that
models, transforms and detectors work; the operators left out keep torchvision's own error message.
"""

import functools
import logging
import sys

import torch
import torch.nn.functional as F
from torch import Tensor

_NMS_BLOCK = 512  # rows of the overlap matrix held at a time


@functools.cache
def _tell_once() -> None:
    logging.getLogger("momentum2").warning(
        "torchvision's compiled operators do not load with torch %s, so nms and roi_align are slower.",
        torch.__version__,
    )


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes (n, 4: x1, y1, x2, y2) that survive greedy suppression, best score first."""
    _tell_once()
    if dets.dtype in (torch.float16, torch.bfloat16):
        dets = dets.float()
    order = scores.argsort(descending=True, stable=True)
    boxes = dets[order]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive_t = torch.ones(len(boxes), dtype=torch.bool)
    alive = alive_t.numpy()  # the same memory; small steps cost less in numpy
    for start in range(0, len(boxes), _NMS_BLOCK):
        rows = start + alive_t[start : start + _NMS_BLOCK].nonzero()[:, 0]
        low = torch.maximum(boxes[rows, None, :2], boxes[None, start:, :2])
        high = torch.minimum(boxes[rows, None, 2:], boxes[None, start:, 2:])
        inter = (high - low).clamp(min=0).prod(-1)
        iou = inter / (area[rows, None] + area[None, start:] - inter)  # 0/0 is NaN: never above the threshold
        suppressed = (iou.double() > iou_threshold).numpy()
        for row, i in zip(suppressed, rows.tolist(), strict=True):
            if alive[i]:
                alive[i + 1 :] &= ~row[i + 1 - start :]
    return order[alive_t]


def _taps(start: Tensor, bin_size: Tensor, bins: int, grid: int, length: int) -> tuple[Tensor, Tensor]:
    """The two neighbors of each sample point along one axis, and their weights: both (k, bins, grid, 2).

    A point more than one pixel outside the map weighs nothing; between that and the map it takes the edge.
    """
    center = (torch.arange(grid, dtype=start.dtype, device=start.device) + 0.5) / grid
    cell = torch.arange(bins, dtype=start.dtype, device=start.device)
    point = start[:, None, None] + (cell[:, None] + center) * bin_size[:, None, None]
    inside = (point >= -1) & (point <= length)
    point = point.clamp(0, length - 1)
    low = point.floor()
    weight = torch.stack((1 - (point - low), point - low), -1) * inside[..., None]
    low = low.long()
    return torch.stack((low, (low + 1).clamp(max=length - 1)), -1), weight


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """RoIAlign of `input` (n, c, h, w) at `rois` (k, 5: image, x1, y1, x2, y2) -> (k, c, pooled_h, pooled_w).

    Every output bin is a weighted sum of pixels, so all bins together are one embedding bag over the pixels:
    nothing of the size (samples × channels) is stored. Differentiable in `input`.
    """
    _tell_once()
    _, channels, height, width = input.shape
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    pixels = input.permute(0, 2, 3, 1).reshape(-1, channels).to(dtype)  # (n·h·w, c)
    image = rois[:, 0].long()
    corners = rois[:, 1:].detach().to(dtype) * spatial_scale - (0.5 if aligned else 0.0)
    size = corners[:, 2:] - corners[:, :2]
    if not aligned:
        size = size.clamp(min=1)
    bin_size = size / torch.tensor((pooled_width, pooled_height), dtype=dtype, device=rois.device)
    # Samples per bin, (x, y): fixed, or so many that they lie at most one pixel apart (none in an empty box).
    grid = torch.full_like(bin_size, sampling_ratio) if sampling_ratio > 0 else bin_size.ceil().clamp(min=0)
    bins = pooled_height * pooled_width
    # The sum over nothing keeps the output differentiable when there is no box at all.
    output = pixels.new_zeros(len(rois), bins, channels) + pixels[:0].sum()
    for gx, gy in grid.long().unique(dim=0).tolist():
        if gx * gy == 0:
            continue
        k = (grid == grid.new_tensor((gx, gy))).all(1).nonzero()[:, 0]
        x, wx = _taps(corners[k, 0], bin_size[k, 0], pooled_width, gx, width)
        y, wy = _taps(corners[k, 1], bin_size[k, 1], pooled_height, gy, height)
        # (k, bin y, bin x, sample y, sample x, neighbor y, neighbor x), the last four summed by the bag
        row = (image[k, None, None, None] * height + y)[:, :, None, :, None, :, None]
        index = row * width + x[:, None, :, None, :, None, :]
        weight = (wy / gy)[:, :, None, :, None, :, None] * (wx / gx)[:, None, :, None, :, None, :]
        bags = (len(k) * bins, gy * gx * 4)
        pooled = F.embedding_bag(
            index.reshape(bags), pixels, per_sample_weights=weight.reshape(bags), mode="sum"
        )
        output = output.index_copy(0, k, pooled.reshape(len(k), bins, channels))
    return output.transpose(1, 2).reshape(len(rois), channels, pooled_height, pooled_width).to(input.dtype)


_library: torch.library.Library | None = None  # the operators live as long as this object


def declare() -> None:
    """Supply the operators without which torchvision cannot be imported."""
    global _library
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
        " int sampling_ratio, bool aligned) -> Tensor"
    )
    library.impl("nms", nms, "CPU")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    _library = library


def allow() -> None:
    """Let the two modules that ask whether the compiled operators are there go on with what is supplied.

    (`torchvision.ops.roi_align` is the function, which hides the module of that name.)
    """
    for name in ("boxes", "roi_align"):
        module = sys.modules[f"torchvision.ops.{name}"]
        module._assert_has_ops = lambda: None  # type: ignore[attr-defined]
    sys.modules["torchvision.ops.roi_align"]._has_ops = lambda: True  # type: ignore[attr-defined]


def supplied() -> bool:
    """Whether torchvision needs momentum2 here."""
    return _library is not None


import torchvision  # noqa: E402  (it may ask for what is above)

__all__ = ["torchvision"]
