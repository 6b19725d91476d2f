"""From uint8 images and draws to the views that the network sees."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from momentum2.augment import ops
from momentum2.augment.crop import on, resized_crop, to_float
from momentum2.augment.draws import Draws, crop_boxes, draw
from momentum2.augment.specs import ViewSpec, view_specs

__all__ = ["Draws", "ViewSpec", "crop_boxes", "draw", "render", "view_specs"]

_CHUNK = 1_250_000  # numbers worked on at a time on a CPU, so that its caches hold them


def render(
    images: Tensor | Sequence[Tensor],
    draws: Sequence[Draws],
    specs: Sequence[ViewSpec],
    channels_last: bool = False,
) -> list[Tensor]:
    """The views of n samples, each (n, C, size, size) float32, normalized.

    Args:
        images: One (n, C, H, W) uint8 tensor of whole images, from which every view takes its own crops; or
            for each view one (n, C, size, size) uint8 tensor of its crops, not yet flipped. Any strides;
            those of (n, H, W, C) arrays are fastest. The views are made on their device.
        draws: For each view the draws of these n samples; on the CPU they cost no transfer.
        specs: For each view what its draws were drawn from.
        channels_last: Memory format of the views.
    """
    whole = isinstance(images, Tensor)
    sources = [images] * len(specs) if isinstance(images, Tensor) else images
    with torch.no_grad(), torch.autocast(sources[0].device.type, enabled=False):
        return [
            _view(source, own.to("cpu"), spec, whole, channels_last)
            for source, own, spec in zip(sources, draws, specs, strict=True)
        ]


def _view(images: Tensor, draws: Draws, spec: ViewSpec, whole: bool, channels_last: bool) -> Tensor:
    n, device = len(draws), images.device
    memory = torch.channels_last if channels_last else torch.contiguous_format
    out = torch.empty((n, images.shape[1], spec.size, spec.size), device=device, memory_format=memory)
    boxes = crop_boxes(draws, images.shape[2], images.shape[3]) if whole else None
    place = torch.where(draws.jitter, ops.hue_place(draws.order), 4)
    chunk = max(1, _CHUNK // (images.shape[1] * spec.size**2)) if device.type == "cpu" else n
    for start in range(0, n, chunk):
        # Sorted so that the color jitter works on contiguous samples.
        order = place[start : start + chunk].argsort(stable=True)
        index = start + order
        own = draws[index]
        if boxes is None:
            x = _mirrored(images, own.flip, index)
        else:
            x = resized_crop(images, boxes[index], spec.size, own.flip, index)
        x = ops.normalize_(_augment_(_turned(x, own), own, spec), spec.mean, spec.std)
        x = _apply(x, own.dropped >= 0, partial(_without_channel, own.dropped))
        out[start : start + chunk] = x.index_select(0, on(device, order.argsort()))
    return out


def _mirrored(crops: Tensor, flip: Tensor, index: Tensor) -> Tensor:
    """Crops of the given indices as float32 in [0, 1], mirrored where `flip` (n,) says so."""
    crops = crops.index_select(0, on(crops.device, index))
    both = torch.cat([crops, crops.flip(3)])
    which = torch.arange(len(flip)) + flip * len(flip)
    return to_float(both.index_select(0, on(crops.device, which)))


def _turned(x: Tensor, draws: Draws) -> Tensor:
    """Views upside down and by quarter turns, those that drew it."""
    x = _apply(x, draws.vertical, lambda some, _: some.flip(2))
    for turns in (1, 2, 3):
        x = _apply(x, draws.turns == turns, lambda some, _, turns=turns: some.rot90(turns, (2, 3)))  # type: ignore[misc]
    return x


def _without_channel(dropped: Tensor, some: Tensor, index: Tensor) -> Tensor:
    """Normalized views with the dropped channel at its mean, which is 0."""
    lost = on(some.device, dropped[index])[:, None] == torch.arange(some.shape[1], device=some.device)
    return some.masked_fill(lost[:, :, None, None], 0.0)


def _augment_(x: Tensor, draws: Draws, spec: ViewSpec) -> Tensor:
    """Color, blur and solarize, each for the samples that drew it; those with jitter come first."""
    jittered = int(draws.jitter.sum())
    if jittered:
        ops.color_jitter_(x[:jittered], draws.factors[:jittered], draws.order[:jittered])
    x = _apply(x, draws.gray, lambda some, _: ops.gray(some).repeat(1, 3, 1, 1))
    x = _apply(
        x, draws.blur, lambda some, index: ops.gaussian_blur(some, draws.sigma[index], spec.blur_kernel)
    )
    return _apply(x, draws.solarize, lambda some, _: ops.solarize(some))


def _apply(x: Tensor, chosen: Tensor, operation: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """x with the operation done to the chosen samples; it gets those and their indices."""
    index = chosen.nonzero()[:, 0]
    if len(index) == 0:
        return x
    if len(index) == len(x):
        return operation(x, index)
    where = on(x.device, index)
    return x.index_copy_(0, where, operation(x.index_select(0, where), index))
