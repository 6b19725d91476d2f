"""nms and roi_align against plain loops written from their definitions, then torchvision's own detectors."""

import logging
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from momentum2 import _torchvision
from momentum2._torchvision import torchvision

ops = torchvision.ops


def plain_nms(boxes: Tensor, scores: Tensor, threshold: float) -> list[int]:
    """The definition: take boxes by score (on ties the earlier), drop those that overlap a taken one."""
    taken: list[int] = []
    rows = boxes.tolist()
    for i in sorted(range(len(rows)), key=lambda i: -scores[i].item()):
        ax1, ay1, ax2, ay2 = rows[i]
        keep = True
        for j in taken:
            bx1, by1, bx2, by2 = rows[j]
            inter = max(0, min(ax2, bx2) - max(ax1, bx1)) * max(0, min(ay2, by2) - max(ay1, by1))
            union = (ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inter
            keep = keep and not (union > 0 and inter / union > threshold)
        if keep:
            taken.append(i)
    return taken


def random_boxes(n: int, side: float, generator: torch.Generator) -> Tensor:
    """Boxes (n, 4) on a coarse grid, so that exact duplicates and equal overlaps occur."""
    corner = (torch.rand(n, 2, generator=generator, dtype=torch.float64) * side).round()
    size = 1 + (torch.rand(n, 2, generator=generator, dtype=torch.float64) * side / 2).round()
    return torch.cat((corner, corner + size), 1)


@pytest.mark.parametrize("n", [0, 1, 7, 300, 1300])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7])
def test_nms_equals_the_plain_loop_with_ties(n: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(n)
    boxes = random_boxes(n, 200.0, generator)
    scores = torch.randint(0, 20, (n,), generator=generator).double()
    kept = ops.nms(boxes, scores, threshold)
    assert kept.dtype == torch.int64
    assert kept.tolist() == plain_nms(boxes, scores, threshold)


def test_nms_keeps_boxes_without_area() -> None:
    boxes = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 2, 2]])
    assert ops.nms(boxes, torch.tensor([0.1, 0.3, 0.2]), 0.5).tolist() == [1, 2, 0]


@pytest.mark.parametrize("n", [0, 40, 1200])  # torchvision changes its algorithm at 1000 boxes
def test_batched_nms_treats_classes_apart(n: int) -> None:
    generator = torch.Generator().manual_seed(3)
    boxes = random_boxes(n, 100.0, generator)
    scores = torch.randperm(n, generator=generator).double()
    classes = torch.randint(0, 3, (n,), generator=generator)
    expected = []
    for c in range(3):
        members = (classes == c).nonzero()[:, 0]
        expected += members[plain_nms(boxes[members], scores[members], 0.4)].tolist()
    kept = ops.batched_nms(boxes, scores, classes, 0.4)
    assert kept.tolist() == sorted(expected, key=lambda i: -scores[i].item())


def plain_roi_align(x: Tensor, rois: Tensor, size: tuple[int, int], scale: float, ratio: int, aligned: bool):
    """The definition: the mean over each bin's grid of points, each read bilinearly from the map.

    A point further than one pixel outside the map is zero; up to there the map's edge continues.
    """

    def read(image: Tensor, py: float, px: float) -> Tensor:
        _, h, w = image.shape
        if py < -1 or py > h or px < -1 or px > w:
            return image.new_zeros(image.shape[0])
        py, px = min(max(py, 0.0), h - 1.0), min(max(px, 0.0), w - 1.0)
        y0, x0 = math.floor(py), math.floor(px)
        y1, x1 = min(y0 + 1, h - 1), min(x0 + 1, w - 1)
        fy, fx = py - y0, px - x0
        top = image[:, y0, x0] * (1 - fx) + image[:, y0, x1] * fx
        bottom = image[:, y1, x0] * (1 - fx) + image[:, y1, x1] * fx
        return top * (1 - fy) + bottom * fy

    out = []
    for batch, *corners in rois.tolist():
        x1, y1, x2, y2 = (c * scale - (0.5 if aligned else 0.0) for c in corners)
        w, h = x2 - x1, y2 - y1
        if not aligned:
            w, h = max(w, 1.0), max(h, 1.0)
        bh, bw = h / size[0], w / size[1]
        gy, gx = (ratio, ratio) if ratio > 0 else (max(math.ceil(bh), 0), max(math.ceil(bw), 0))
        for i in range(size[0]):
            for j in range(size[1]):
                total = x.new_zeros(x.shape[1])
                for a in range(gy):
                    for b in range(gx):
                        py, px = y1 + i * bh + (a + 0.5) * bh / gy, x1 + j * bw + (b + 0.5) * bw / gx
                        total = total + read(x[int(batch)], py, px)
                out.append(total / max(gy * gx, 1))
    return torch.stack(out).reshape(len(rois), *size, x.shape[1]).permute(0, 3, 1, 2)


ROIS = torch.tensor(
    [
        [0, 2.3, 1.7, 11.1, 9.9],
        [1, 0.0, 0.0, 16.0, 14.0],
        [1, -9.0, -7.0, 5.0, 4.0],  # hangs over the top left corner by more than a pixel
        [0, 12.0, 9.0, 29.0, 30.0],  # and over the bottom right
        [1, 40.0, 40.0, 60.0, 60.0],  # lies outside altogether
        [0, 5.0, 5.0, 5.0, 8.0],  # no width
        [0, 3.3, 3.1, 3.6, 3.5],  # less than a pixel
    ],
    dtype=torch.float64,
)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_roi_align_equals_the_plain_loop(scale: float, ratio: int, aligned: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    expected = plain_roi_align(x, ROIS, (3, 2), scale, ratio, aligned)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), x)

    actual = ops.roi_align(x, ROIS, (3, 2), scale, ratio, aligned)
    (actual_grad,) = torch.autograd.grad((actual * weight).sum(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-12, atol=1e-12)


def test_roi_align_of_no_boxes_is_empty_and_differentiable() -> None:
    x = torch.randn(1, 3, 4, 4, requires_grad=True)
    out = ops.roi_align(x, torch.zeros(0, 5), (2, 2))
    assert out.shape == (0, 3, 2, 2)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.count_nonzero() == 0


def test_roi_align_keeps_bf16_and_computes_in_fp32() -> None:
    x = torch.randn(2, 3, 7, 8).bfloat16().contiguous(memory_format=torch.channels_last)
    out = ops.roi_align(x, ROIS.float(), (2, 2), 1.0, 2, True)
    assert out.dtype == torch.bfloat16
    expected = ops.roi_align(x.float(), ROIS.float(), (2, 2), 1.0, 2, True)
    torch.testing.assert_close(out, expected.bfloat16(), rtol=0, atol=0)


@pytest.mark.skipif(not _torchvision.supplied(), reason="torchvision's own operators are in use")
def test_the_slow_path_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _torchvision._tell_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="momentum2"):
        for _ in range(3):
            ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
            ops.roi_align(torch.zeros(1, 1, 2, 2), torch.zeros(1, 5), (1, 1))
    assert len(caplog.records) == 1
    assert "are slower" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "try:\n import torchvision\nexcept RuntimeError:\n pass\n"])
def test_a_fresh_process_can_import_torchvision_and_timm(first: str) -> None:
    code = (
        first + "import momentum2, torchvision, timm\nfrom torchvision.ops import nms, roi_align\nprint(nms)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # importing alone says nothing about detection


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"])
def test_detectors_train_and_detect(name: str) -> None:
    torch.manual_seed(0)
    model = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=64
    )
    images = [torch.rand(3, 64, 64), torch.rand(3, 48, 64)]
    targets = [
        {
            "boxes": torch.tensor([[4.0, 6.0, 30.0, 40.0]]),
            "labels": torch.tensor([1]),
            "masks": torch.ones(1, *image.shape[1:], dtype=torch.uint8),
        }
        for image in images
    ]
    losses = model.train()(images, targets)
    total = sum(losses.values())
    assert total.isfinite()
    total.backward()
    gradient = model.backbone.body.layer4[2].conv3.weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
    with torch.no_grad():
        detections = model.eval()(images)
    assert all(d["boxes"].shape == (len(d["scores"]), 4) for d in detections)
