"""From uint8 images and draws to the views that the network sees."""

from collections.abc import Sequence

import torch
from torch import Tensor

from momentum2.augment import ops
from momentum2.augment.crop import resized_crop, to_float
from momentum2.augment.draws import Draws, crop_boxes, draw
from momentum2.augment.specs import ViewSpec, view_specs

__all__ = ["Draws", "ViewSpec", "crop_boxes", "draw", "render", "view_specs"]

_CHUNK = 2**20  # numbers that are worked on at a time on a CPU: what its caches hold


def render(
    images: Tensor | Sequence[Tensor],
    draws: Sequence[Draws],
    specs: Sequence[ViewSpec],
    channels_last: bool = False,
) -> list[Tensor]:
    """The views of n samples, each (n, 3, size, size) float32, normalised.

    Args:
        images: One (n, 3, H, W) uint8 tensor of whole images, from which every view takes its own crops; or
            for each view one (n, 3, size, size) uint8 tensor of its crops, not yet flipped. Any strides;
            those of (n, H, W, 3) arrays are fastest. The views are made on their device.
        draws: For each view the draws of these n samples, on the CPU.
        specs: For each view what its draws were drawn from.
        channels_last: Memory format of the views.
    """
    sources = [images] * len(specs) if isinstance(images, Tensor) else images
    whole = isinstance(images, Tensor)
    return [
        _view(source, draw, spec, whole, channels_last)
        for source, draw, spec in zip(sources, draws, specs, strict=True)
    ]


def _view(images: Tensor, draws: Draws, spec: ViewSpec, whole: bool, channels_last: bool) -> Tensor:
    n, device = len(draws), images.device
    memory = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty((n, 3, spec.size, spec.size), device=device, memory_format=memory)
    boxes = crop_boxes(draws, images.shape[2], images.shape[3]) if whole else None
    chunk = max(1, _CHUNK // (3 * spec.size**2)) if device.type == "cpu" else n
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        x = to_float(images[part]) if boxes is None else resized_crop(images[part], boxes[part], spec.size)
        out[part] = ops.normalise_(_augment_(x, draws[part], spec), spec.mean, spec.std)
    return out


def _augment_(x: Tensor, draws: Draws, spec: ViewSpec) -> Tensor:
    """Flip, colour, blur and solarize, each for the samples that drew it."""

    def chosen(mask: Tensor) -> tuple[Tensor, Tensor]:
        index = mask.nonzero()[:, 0]
        return index, index.to(x.device)

    _, index = chosen(draws.flip)
    if len(index):
        x[index] = x[index].flip(3)
    which, index = chosen(draws.jitter)
    if len(index):
        x[index] = ops.colour_jitter_(x[index], draws.factors[which], draws.order[which])
    _, index = chosen(draws.grey)
    if len(index):
        x[index] = ops.grey(x[index]).expand(-1, 3, -1, -1)
    which, index = chosen(draws.blur)
    if len(index):
        x[index] = ops.gaussian_blur(x[index], draws.sigma[which], spec.blur_kernel)
    _, index = chosen(draws.solarize)
    if len(index):
        x[index] = ops.solarize(x[index])
    return x
