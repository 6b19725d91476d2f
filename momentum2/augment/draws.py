"""Random decisions, drawn apart from the pixels they are applied to.

Sample i of step k gets the same numbers whichever process asks: they come from a counter-based generator
(Philox) whose key is (seed, step) and whose counter is (sample, view). Asking for a slice of the batch costs
that slice only.
"""

from dataclasses import dataclass, fields
from itertools import permutations
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from momentum2.augment.specs import ViewSpec

#: Philox makes four 64-bit numbers per block: 36 numbers for every sample, all of which are in use.
_BLOCKS = 9
_ORDERS = torch.tensor(list(permutations(range(4))))


@dataclass(frozen=True)
class Draws:
    """Every random decision about one view of n samples, as tensors with leading dimension n.

    Indexing with a slice or an index tensor gives the draws of those samples.

    Args:
        area: (n, 10) float64, attempted crop areas as shares of the image.
        ratio: (n, 10) float64, attempted crop ratios, width over height.
        corner: (n, 2) float64 in [0, 1), where the crop lies between top and bottom, left and right.
        central: (n, 3) float64, the crop when no attempt fits: narrowest and widest ratio, share of the side.
        flip: (n,) bool.
        jitter: (n,) bool, whether the colors are jittered.
        factors: (n, 4) float32, brightness, contrast, saturation (1 is neutral) and hue (0 is neutral).
        order: (n, 4) int64, the order in which those four are applied.
        gray: (n,) bool.
        blur: (n,) bool.
        sigma: (n,) float32, the blur's standard deviation in pixels.
        solarize: (n,) bool.
        vertical: (n,) bool, whether the view is flipped upside down.
        turns: (n,) int64, quarter turns counterclockwise, 0 to 3.
        dropped: (n,) int64, the channel that is lost; -1 for none.
    """

    area: Tensor
    ratio: Tensor
    corner: Tensor
    central: Tensor
    flip: Tensor
    jitter: Tensor
    factors: Tensor
    order: Tensor
    gray: Tensor
    blur: Tensor
    sigma: Tensor
    solarize: Tensor
    vertical: Tensor
    turns: Tensor
    dropped: Tensor

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, index: slice | Tensor) -> Self:
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def to(self, device: torch.device | str) -> Self:
        """The draws on another device; `render` reads them on the CPU."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))


def draw(
    spec: ViewSpec, seed: int, step: int, view: int, count: int, start: int = 0, stop: int | None = None
) -> Draws:
    """Draws for samples [start, stop) of the `count` samples in the global batch of a step."""
    stop = count if stop is None else stop
    if not 0 <= start <= stop <= count:
        raise ValueError(f"samples [{start}, {stop}) are not within a batch of {count}")
    u = _uniforms(seed, step, view, start, stop)
    brightness, contrast, saturation, hue = spec.jitter
    low = torch.tensor([max(0, 1 - brightness), max(0, 1 - contrast), max(0, 1 - saturation), -hue])
    high = torch.tensor([1 + brightness, 1 + contrast, 1 + saturation, hue])
    area, central = _between(u[:, :10], *spec.area), (*spec.ratio, 1.0)
    if spec.center is not None:
        area, central = torch.full_like(area, torch.inf), (1.0, 1.0, spec.center)  # no attempt fits
    return Draws(
        area=area,
        ratio=_between(u[:, 10:20], *np.log(spec.ratio)).exp(),
        corner=u[:, 20:22],
        central=torch.tensor(central, dtype=torch.float64).expand(len(u), 3),
        flip=u[:, 22] < spec.flip_p,
        jitter=u[:, 23] < spec.jitter_p,
        factors=_between(u[:, 24:28], low, high).float(),
        order=_ORDERS[(u[:, 28] * len(_ORDERS)).long()],
        gray=u[:, 29] < spec.gray_p,
        blur=u[:, 30] < spec.blur_p,
        sigma=_between(u[:, 31], *spec.blur_sigma).float(),
        solarize=u[:, 32] < spec.solarize_p,
        vertical=u[:, 33] < spec.vertical_flip_p,
        turns=_one_of(u[:, 34], spec.rotate90_p, 3) + 1,
        dropped=_one_of(u[:, 35], spec.channel_drop_p, len(spec.mean)),
    )


def draw_at(spec: ViewSpec, seed: int, step: int, view: int, count: int, places: NDArray[np.int64]) -> Draws:
    """Draws for the samples at `places` of the global batch, (n,) in rising order."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)  # of consecutive places
    parts = [draw(spec, seed, step, view, count, int(run[0]), int(run[-1]) + 1) for run in runs]
    if len(parts) == 1:
        return parts[0]
    return Draws(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Draws)))


def crop_boxes(draws: Draws, heights: Tensor | int, widths: Tensor | int) -> Tensor:
    """(n, 4) int64 crops (top, left, height, width) for images of the given sizes, one size or n of them.

    The rule of torchvision's RandomResizedCrop: the first of ten attempts that fits into the image, else the
    largest central crop within the limits of the ratio.
    """
    n = len(draws)
    size = torch.stack([torch.as_tensor(s).expand(n) for s in (heights, widths)], 1)  # (n, 2)
    pixels = size.prod(1, keepdim=True) * draws.area
    attempts = torch.stack([pixels / draws.ratio, pixels * draws.ratio], 2).sqrt().round()  # (n, 10, 2)
    fits = ((attempts > 0) & (attempts <= size[:, None])).all(2)
    first = fits.byte().argmax(1)  # 0 where none fits
    fitting = attempts[torch.arange(n), first]
    any_fits = fits.any(1, keepdim=True)

    height, width = size.double().unbind(1)
    narrowest, widest, share = draws.central.unbind(1)
    central = torch.stack(
        [torch.minimum(height, width / narrowest), torch.minimum(width, height * widest)], 1
    )
    central = (central * share[:, None]).round().clamp(min=1)

    extent = torch.where(any_fits, fitting, central)
    spare = size - extent
    corner = torch.where(any_fits, draws.corner * (spare + 1), spare / 2).floor()
    return torch.cat([corner, extent], 1).long()


def _uniforms(seed: int, step: int, view: int, start: int, stop: int) -> Tensor:
    """(stop - start, 36) float64 in [0, 1)."""
    key = np.array([seed % 2**64, step], dtype=np.uint64)
    counter = np.array([start * _BLOCKS, view, 0, 0], dtype=np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw((stop - start) * _BLOCKS * 4)
    return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).view(-1, _BLOCKS * 4)


def _one_of(u: Tensor, probability: float, count: int) -> Tensor:
    """With this probability one of `count` numbers, all alike, from one draw; else -1."""
    which = (u * (count / max(probability, 1e-300))).clamp(max=count - 1).long()
    return torch.where(u < probability, which, -1)


def _between(u: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    return low + u * (high - low)
