"""Batched image operations with one set of parameters for every sample.

Images are (n, 3, H, W) float32 in [0, 1], on any device, and are changed in place. Parameters have leading
dimension n. Each operation matches torchvision's function for one image.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
_LUMA = (0.2989, 0.587, 0.114)


def colour_jitter_(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue with factors (n, 4), in each sample's own order (n, 4)."""
    place = (order == HUE).int().argmax(1)  # when each sample's hue is due
    place, by_place = place.sort()
    before = [int((place <= k).sum()) for k in range(4)]  # samples [:before[k]] do hue at position <= k
    index = by_place.to(images.device)
    x, factors, order = images[index], factors[by_place], order[by_place]
    chosen = factors.gather(1, order)  # the factor of the k-th operation

    for k in range(3):  # what comes before the hue ...
        blend_(x[before[k] :], chosen[before[k] :, k], order[before[k] :, k])
    hue_(x, factors[:, HUE])
    for k in range(1, 4):  # ... and after it
        blend_(x[: before[k - 1]], chosen[: before[k - 1], k], order[: before[k - 1], k])
    images[index] = x
    return images


def blend_(images: Tensor, factor: Tensor, operation: Tensor) -> Tensor:
    """Brightness, contrast or saturation: factor * image + (1 - factor) * other, clamped.

    The other image is black for BRIGHTNESS, the mean grey for CONTRAST, the image's own grey for SATURATION.
    """
    if len(images) == 0:
        return images
    contrast, saturation = ((operation == which) * (1 - factor) for which in (CONTRAST, SATURATION))
    other = grey(images)
    mean = other.mean(3).mean(2)[..., None, None]
    other.mul_(_each(saturation, images)).add_(mean.mul_(_each(contrast, images)))
    return images.mul_(_each(factor, images)).add_(other).clamp_(0, 1)


def hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Rotates the hue by shift (n,) in [-0.5, 0.5] turns; value and saturation (HSV) stay."""
    # With hue in sextants and all of it multiplied by the chroma C = M - m, no division is needed: on the
    # circle of 6C, channel X lies T - 2X away from the hue, with T = R + G + B + M - 2m.
    # Its value is m + clamp(2C - distance, 0, C), before and after the rotation.
    high, low = images.amax(1, keepdim=True), images.amin(1, keepdim=True)
    chroma = high - low
    total = images.sum(1, keepdim=True).add_(high).sub_(low, alpha=2)
    distance = total - 2 * images
    side = images[:, [1, 2, 0]] - images[:, [2, 0, 1]]
    distance = distance.copysign_(side).add_(chroma * _each(shift * 6, images)).abs_()
    distance.sub_(chroma, alpha=3).abs_().sub_(chroma).add_(low)
    return torch.clamp(distance, low, high, out=images)


def grey(images: Tensor) -> Tensor:
    """(n, 1, H, W): the luma of the images."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


def gaussian_blur(images: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Gaussian blur with sigma (n,) in pixels and an odd number of taps, reflecting at the border."""
    n, channels, height, width = images.shape
    # What lies beyond 3.5 sigma weighs less than 5e-4.
    radius = min(kernel // 2, math.ceil(3.5 * float(sigma.max())))
    taps = torch.arange(-radius, radius + 1) / sigma[:, None]
    weights = torch.softmax(-0.5 * taps**2, 1).to(images.device)
    weights = weights.repeat_interleave(channels, 0)[:, None, None]  # (3n, 1, 1, taps)
    x = F.pad(images, (radius,) * 4, mode="reflect").flatten(0, 1)[None]
    x = F.conv2d(x, weights, groups=n * channels)
    x = F.conv2d(x, weights.mT, groups=n * channels)
    return x.view(n, channels, height, width)


def solarize(images: Tensor) -> Tensor:
    """Inverts what is brighter than one half."""
    return torch.minimum(images, 1 - images)


def normalise_(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtracts the channels' mean, then divides by their std."""
    offset, scale = (torch.tensor(v, device=images.device)[:, None, None] for v in (mean, std))
    return images.sub_(offset).div_(scale)


def _each(values: Tensor, images: Tensor) -> Tensor:
    """(n,) numbers, shaped to multiply (n, 3, H, W) images on their device."""
    return values.to(images.device)[:, None, None, None]
