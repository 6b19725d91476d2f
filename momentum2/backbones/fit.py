"""Whether a network takes images of a size: tried on the meta device, where shapes are computed and no pixel is."""

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from momentum2.errors import UserError


class Fit(NamedTuple):
    """What a forward and a backward show.

    Args:
        feature_dim: Width of the features.
        unused: Names of the trained parameters that they do not depend on.
    """

    feature_dim: int
    unused: tuple[str, ...]


class Unfit(Exception):
    """Why a network does not take a size, in words."""


def measure(
    network: nn.Module, sizes: Iterable[int], channels: int, backward: bool = True, name: str | None = None
) -> Fit:
    """Try images (2, channels, size, size) of each size on a copy without storage; no BN statistic moves.

    `name` is what the user calls the network (default: its class).
    """
    name = name or type(network).__name__
    shadow = copy.deepcopy(network).to("meta").train()
    widths: dict[int, int] = {}
    for size in sizes:
        try:
            features = shadow(torch.empty(2, channels, size, size, device="meta"))
        except Exception as error:  # there is no end to what networks raise
            raise Unfit(size, in_words(error)) from None
        if not isinstance(features, Tensor) or features.dim() != 2:
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise UserError(
                f"An encoder must return one row of features per image, (n, d); {name} returns {found}."
            )
        if features.shape[1] == 0:
            raise UserError(f"{name} has no features without its classifier. Choose another backbone.")
        try:
            if backward:
                features.sum().backward()
        except Exception as error:
            raise Unfit(size, in_words(error)) from None
        widths[size] = features.shape[1]
    if len(set(widths.values())) > 1:
        told = ", ".join(f"{width} at {size} px" for size, width in widths.items())
        raise UserError(f"{name} has a different number of features at each size: {told}.")
    unused = tuple(n for n, p in shadow.named_parameters() if p.requires_grad and p.grad is None)
    return Fit(next(iter(widths.values())), unused)


def nearest(size: int, usual: int | None, takes: Callable[[int], bool]) -> int | None:
    """The size nearest to `size` that a network takes, among multiples of what strides and patches are."""
    steps = (32, 16, 14)
    near = {size // step * step + more for step in steps for more in (0, step)}
    known = sorted({*near, *range(32, 257, 32), *([usual] if usual else [])} - {0, size})
    return next((s for s in sorted(known, key=lambda s: abs(s - size)) if takes(s)), None)


def in_words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def parameters_of(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())
