"""Every operation against torchvision's function for one image, with the parameters that sample has."""

import pytest
import torch
from torch import Tensor

from momentum2._torchvision import torchvision
from momentum2.augment import ops

F = torchvision.transforms.functional
TOLERANCE = 2 / 255
SIZES = [(32, 32), (33, 47), (96, 96), (224, 224)]
N = 15


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def images(request, pictures) -> Tensor:
    return pictures(N, *request.param).float() / 255


def one_by_one(function, images: Tensor, *parameters: Tensor) -> Tensor:
    rows = zip(images, *(parameter.tolist() for parameter in parameters), strict=True)
    return torch.stack([function(image, *row) for image, *row in rows])


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize(
    ("operation", "function"),
    [
        (ops.BRIGHTNESS, F.adjust_brightness),
        (ops.CONTRAST, F.adjust_contrast),
        (ops.SATURATION, F.adjust_saturation),
    ],
)
def test_blend(images, operation, function):
    factor = torch.linspace(0, 2.5, N)
    expected = one_by_one(function, images, factor)
    assert far(ops.blend_(images.clone(), factor, torch.full((N,), operation)), expected) <= TOLERANCE


def test_blend_mixes_operations(images):
    functions = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation]
    operation, factor = torch.arange(N) % 3, torch.linspace(0.5, 1.5, N)
    expected = one_by_one(lambda image, o, f: functions[o](image, f), images, operation, factor)
    assert far(ops.blend_(images.clone(), factor, operation), expected) <= TOLERANCE


@pytest.mark.parametrize("limit", [0.1, 0.5])
def test_hue(images, limit):
    shift = torch.linspace(-limit, limit, N)
    assert far(ops.hue_(images.clone(), shift), one_by_one(F.adjust_hue, images, shift)) <= TOLERANCE


def test_hue_of_every_sextant_boundary():
    levels = torch.tensor([0.0, 0.25, 0.5, 1.0])
    colors = torch.cartesian_prod(levels, levels, levels).T.reshape(1, 3, 8, 8)
    shift = torch.arange(-6, 7) / 12
    images = colors.expand(len(shift), -1, -1, -1)
    assert far(ops.hue_(images.clone(), shift), one_by_one(F.adjust_hue, images, shift)) < 1e-5


def test_jitter_in_each_samples_own_order(pictures):
    functions = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    orders = torch.cartesian_prod(*[torch.arange(4)] * 4)
    orders = orders[(orders.sort(1).values == torch.arange(4)).all(1)]
    images = pictures(24, 40, 40).float() / 255
    factors = torch.rand(24, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    factors[:, 3] = (factors[:, 3] - 1) * 0.2

    def chain(image, factor, order):
        for which in order:
            image = functions[which](image, factor[which])
        return image

    expected = one_by_one(chain, images, factors, orders)
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    for samples in (shuffled, ops.hue_place(orders).argsort()):  # unsorted, and sorted as it likes them best
        result = ops.color_jitter_(images[samples], factors[samples], orders[samples])
        assert far(result, expected[samples]) <= TOLERANCE


def test_gray(images):
    assert far(ops.gray(images), F.rgb_to_grayscale(images)) <= TOLERANCE


def test_gaussian_blur(images):
    kernel = min(images.shape[2:]) // 10 // 2 * 2 + 1
    sigma = torch.linspace(0.1, 2, N)
    expected = one_by_one(lambda image, s: F.gaussian_blur(image, [kernel, kernel], [s, s]), images, sigma)
    assert far(ops.gaussian_blur(images, sigma, kernel), expected) <= TOLERANCE


def test_blur_does_not_depend_on_the_other_samples(pictures):
    images = pictures(24, 60, 60).float() / 255
    sigma = torch.linspace(0.1, 2, 24)
    together = ops.gaussian_blur(images, sigma, 15)
    for share in (1, 2, 3, 8):
        for start in range(0, 24, share):
            part = slice(start, start + share)
            assert torch.equal(ops.gaussian_blur(images[part], sigma[part], 15), together[part])


def test_solarize(images):
    assert far(ops.solarize(images), F.solarize(images, 0.5)) <= TOLERANCE


def test_normalize(images):
    mean, std = (0.1, 0.4, 0.7), (0.2, 0.3, 0.5)
    assert far(ops.normalize_(images.clone(), mean, std), F.normalize(images, mean, std)) < 1e-5
