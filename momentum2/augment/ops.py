"""Batched image operations with one set of parameters for every sample.

Images are (n, C, H, W) float32 in [0, 1], on any device; functions whose names end in _ change them. Hue and
saturation are for the three channels of colors; with another number of channels gray is their mean.
Parameters have leading dimension n and are read on the CPU. Each operation matches torchvision's own.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.augment.crop import on

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
_LUMA = (0.2989, 0.587, 0.114)
_STEEP = 1e9  # makes a clamped line a step


def color_jitter_(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue with factors (n, 4), in each sample's own order (n, 4).

    Fastest on samples that are sorted by `hue_place`.
    """
    place = hue_place(order)
    if (place.diff() < 0).any():
        by_place = place.argsort(stable=True)
        index = on(images.device, by_place)
        sorted_images = color_jitter_(images.index_select(0, index), factors[by_place], order[by_place])
        return images.index_copy_(0, index, sorted_images)

    chosen = factors.gather(1, order)  # the factor of the k-th operation
    # The number that come first, with their hue at place <= k.
    done = [int((place <= k).sum()) for k in range(3)]
    for k in range(3):  # what comes before the hue ...
        blend_(images[done[k] :], chosen[done[k] :, k], order[done[k] :, k])
    if images.shape[1] == 3:
        hue_(images, factors[:, HUE])
    for k in range(1, 4):  # ... and after it
        blend_(images[: done[k - 1]], chosen[: done[k - 1], k], order[: done[k - 1], k])
    return images


def hue_place(order: Tensor) -> Tensor:
    """(n,) which of the four places of an order (n, 4) is the hue's."""
    return (order == HUE).int().argmax(1)


def blend_(images: Tensor, factor: Tensor, operation: Tensor) -> Tensor:
    """Brightness, contrast or saturation: factor * image + (1 - factor) * other, clamped.

    The other image is black for BRIGHTNESS, the mean gray for CONTRAST, the image's own gray for SATURATION.
    """
    if len(images) == 0:
        return images
    contrast, saturation = ((operation == which) * (1 - factor) for which in (CONTRAST, SATURATION))
    other = gray(images)
    mean = other.mean(3).mean(2)[..., None, None]
    other.mul_(_each(saturation, images)).add_(mean.mul_(_each(contrast, images)))
    return images.mul_(_each(factor, images)).add_(other).clamp_(0, 1)


def hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Rotates the hue by shift (n,) in [-0.5, 0.5] turns; value and saturation (HSV) stay."""
    # A third of a turn moves every channel on by one. What remains is at most a sextant, 1/6 turn.
    thirds = (shift * 3).round().long()
    if thirds.any():
        channels = on(images.device, (torch.arange(3) - thirds[:, None]).remainder(3))
        images.copy_(images.gather(1, channels[:, :, None, None].expand_as(images)))
    sextants = shift * 6 - thirds * 2

    # On a circle of six chromas C = max - min, a channel X lies max + C - 2X + mid away from the hue, and
    # X = clamp(max + C - distance, min, max). The rotation changes the distance by +-`sextants * C`; the sign
    # is that of the difference of the other two channels.
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    larger, smaller = torch.maximum(red, green), torch.minimum(red, green)
    high, low = torch.maximum(larger, blue), torch.minimum(smaller, blue)
    middle = torch.maximum(smaller, larger.clamp_(max=blue), out=smaller)
    rotation = torch.sub(high, low, out=larger).mul_(_each(sextants.abs(), images))
    change = torch.empty_like(images)
    for channel in range(3):
        torch.sub(images[:, (channel + 1) % 3], images[:, (channel + 2) % 3], out=change[:, channel])
    change.mul_(_each(sextants * _STEEP, images))
    torch.clamp(change, middle - rotation, middle.add_(rotation), out=change)
    torch.lerp(change, images, 2, out=images)  # 2X - change
    return torch.clamp(images, low, high, out=images)


def gray(images: Tensor) -> Tensor:
    """(n, 1, H, W): the luma of the images; of other channels than colors, their mean."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return (red * _LUMA[0]).add_(green, alpha=_LUMA[1]).add_(blue, alpha=_LUMA[2])


def gaussian_blur(images: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Gaussian blur with sigma (n,) in pixels and at most `kernel` taps (odd), reflecting at the border."""
    n, channels, height, width = images.shape
    half = kernel // 2
    taps = torch.arange(-half, half + 1)
    reach = (3.5 * sigma).ceil().clamp(max=half)  # what lies beyond weighs less than 5e-4
    exponent = -0.5 * (taps / sigma[:, None]) ** 2
    weights = exponent.masked_fill(taps.abs() > reach[:, None], -torch.inf).softmax(1)
    # Only now are the taps cut to those in use, so that a sample's weights do not depend on the others.
    radius = int(reach.max())
    weights = on(images.device, weights[:, half - radius : half + radius + 1])
    weights = weights.repeat_interleave(channels, 0)[:, None, None]  # (Cn, 1, 1, taps)
    x = F.pad(images, (radius,) * 4, mode="reflect").flatten(0, 1)[None]
    x = F.conv2d(x, weights, groups=n * channels)
    x = F.conv2d(x, weights.mT, groups=n * channels)
    return x.view(n, channels, height, width)


def solarize(images: Tensor) -> Tensor:
    """Inverts what is brighter than one half."""
    return torch.minimum(images, 1 - images)


def normalize_(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Subtracts the channels' mean, then divides by their std."""
    offset, scale = (_constant(v, images.device)[:, None, None] for v in (mean, std))
    return images.sub_(offset).div_(scale)


@cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The values on the device, copied there once."""
    return on(device, torch.tensor(values))


def _each(values: Tensor, images: Tensor) -> Tensor:
    """(n,) numbers, shaped to multiply (n, C, H, W) images on their device."""
    return on(images.device, values)[:, None, None, None]
