"""Crops against torchvision's antialiased bilinear `resized_crop`."""

import numpy as np
import pytest
import torch
from torch import Tensor

from momentum2._torchvision import torchvision
from momentum2.augment import crop, resized_crop, resized_crop_one

F = torchvision.transforms.functional
TOLERANCE = 2 / 255


def boxes_within(height: int, width: int, n: int) -> Tensor:
    """Whole images, single pixels, and whatever else chance brings."""
    generator = np.random.default_rng(0)
    rows = [(0, 0, height, width), (height - 1, width - 1, 1, 1), (0, width // 2, height, 1)]
    while len(rows) < n:
        h, w = int(generator.integers(1, height + 1)), int(generator.integers(1, width + 1))
        rows.append((int(generator.integers(height - h + 1)), int(generator.integers(width - w + 1)), h, w))
    return torch.tensor(rows)


def expected_crops(images: Tensor, boxes: Tensor, size: int) -> Tensor:
    pairs = zip(images.float() / 255, boxes.tolist(), strict=True)
    return torch.stack([F.resized_crop(image, *box, [size, size], antialias=True) for image, box in pairs])


@pytest.mark.parametrize("kernel", ["products", "one by one"])
@pytest.mark.parametrize(
    ("source", "size"), [((32, 32), 32), ((50, 77), 24), ((96, 96), 96), ((256, 300), 224)]
)
def test_resized_crop(pictures, monkeypatch, kernel, source, size):
    monkeypatch.setattr(crop, "_LARGE", 10**6 if kernel == "products" else 0)
    images, boxes = pictures(10, *source), boxes_within(*source, 10)
    flip, index = torch.arange(10) % 3 == 0, torch.arange(9, -1, -1)
    expected = expected_crops(images, boxes, size)
    assert (resized_crop(images, boxes, size) - expected).abs().max() <= TOLERANCE
    arrays = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # strides of (n, H, W, 3)
    assert (resized_crop(arrays, boxes, size) - expected).abs().max() <= TOLERANCE

    flipped = torch.where(flip[:, None, None, None], expected.flip(3), expected)
    result = resized_crop(images, boxes[index], size, flip[index], index)
    assert (result - flipped[index]).abs().max() <= TOLERANCE


@pytest.mark.parametrize(("source", "size"), [((40, 60), 32), ((256, 300), 96), ((256, 300), 224)])
def test_resized_crop_one(pictures, source, size):
    images, boxes = pictures(10, *source), boxes_within(*source, 10)
    arrays = images.permute(0, 2, 3, 1).numpy()
    arrays.setflags(write=False)
    result = np.stack([resized_crop_one(*pair, size) for pair in zip(arrays, boxes.tolist(), strict=True)])
    assert result.dtype == np.uint8
    views = torch.from_numpy(result).permute(0, 3, 1, 2) / 255
    assert (views - expected_crops(images, boxes, size)).abs().max() <= TOLERANCE


def test_resized_crop_one_of_a_reduced_image():
    """A box with fractions takes the same part of a half-size image as the whole box of the original."""
    ramp = np.linspace(0, 255, 120)[None, :, None] * np.linspace(0.2, 1, 90)[:, None, None]
    image = ramp.repeat(3, 2).round().astype(np.uint8)
    half = image.reshape(45, 2, 60, 2, 3).mean((1, 3)).round().astype(np.uint8)
    for top, left, height, width in [(7, 5, 61, 83), (0, 0, 90, 119), (11, 13, 79, 107)]:
        whole = resized_crop_one(image, (top, left, height, width), 24).astype(int)
        reduced = resized_crop_one(half, (top / 2, left / 2, height / 2, width / 2), 24)
        assert np.abs(whole - reduced).max() <= 2
