"""The two halves of every batch norm here: take statistics, and normalise with given ones.

A batch (n, c, ...) is seen as k virtual devices of n/k consecutive samples. Statistics are (k, c), in fp32
(fp64 for fp64 input), with the biased variance.
"""

import torch
from torch import Tensor

from momentum2.errors import UserError


def per_device(x: Tensor, devices: int) -> Tensor:
    """(n, c, ...) -> (devices, n/devices, c, ...), consecutive samples together."""
    if len(x) % devices:
        raise UserError(
            f"A batch of {len(x)} samples does not divide into {devices} virtual devices; choose a batch "
            f"size that is a multiple of {devices}."
        )
    return x.view(devices, len(x) // devices, *x.shape[1:])


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def moments(x: Tensor, devices: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel on each virtual device, (devices, c) each. Differentiable."""
    chunks = per_device(x, devices).to(statistics_dtype(x))
    var, mean = torch.var_mean(chunks, dim=(1, *range(3, chunks.dim())), correction=0)
    return mean, var


def normalise(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise each virtual device's samples by its own mean and var (devices, c). Differentiable."""
    devices, c = mean.shape
    over = (devices, 1, c) + (1,) * (x.dim() - 2)
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    y = (per_device(x, devices).to(mean.dtype) - mean.view(over)) * scale.view(over)
    if bias is not None:
        y = y + bias.view((c,) + (1,) * (x.dim() - 2))
    return y.flatten(0, 1).to(x.dtype)
