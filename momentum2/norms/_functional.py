"""Batch norm in three moves: take the batch's statistics, decide what to normalise by, normalise.

A batch (n, c, ...) is seen as k virtual devices of n/k consecutive samples each. Statistics are (k, c), in
fp32 (fp64 for fp64 input), with the biased variance. Norms differ in the middle move alone, a `Statistics`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from momentum2.errors import UserError

#: (mean, var, values per channel and device) of the batch -> (mean, var) to normalise by; differentiable.
Statistics = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    statistics: Statistics,
    devices: int = 1,
) -> Tensor:
    """Normalise x (n, c, ...) by what `statistics` makes of its own; gradients flow through those too."""
    if len(x) % devices:
        raise UserError(
            f"A batch of {len(x)} samples does not divide into {devices} virtual devices; choose a batch "
            f"size that is a multiple of {devices}."
        )
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _BatchNorm.apply(x, weight, bias, eps, statistics, devices)  # type: ignore[no-any-return,no-untyped-call]
    mean, var = _moments(x, devices)
    return _normalised(x, *statistics(mean, var, _count(x, devices)), weight, bias, eps)


class _BatchNorm(torch.autograd.Function):
    """`batch_norm` with its backward written out: autograd through each step would read and keep far more."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: Statistics,
        devices: int,
    ) -> Tensor:
        mean, var = _moments(x, devices)
        # The middle move is small and may be anything, a collective for instance: autograd has its graph.
        with torch.enable_grad():
            ours = mean.detach().requires_grad_(), var.detach().requires_grad_()
            used = statistics(*ours, _count(x, devices))
        ctx.save_for_backward(x, weight, bias)  # type: ignore[arg-type]
        ctx.statistics, ctx.eps = (ours, used), eps  # type: ignore[attr-defined]
        return _normalised(x, used[0].detach(), used[1].detach(), weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        ours, used = ctx.statistics  # type: ignore[attr-defined]
        mean, (used_mean, used_var) = ours[0].detach(), (t.detach() for t in used)
        devices, over = len(mean), _per_channel(x)
        rstd = (used_var + ctx.eps).rsqrt()  # type: ignore[attr-defined]
        scale = rstd if weight is None else rstd * weight

        g = _per_device(grad, devices)
        centred = _per_device(x, devices) - mean.view(over)
        dims = _reduced(g)
        sum_g = g.sum(dims)  # (k, c), as all that follows
        sum_gx = ((g * centred).sum(dims) + (mean - used_mean) * sum_g) * rstd  # Σ g · normalised x
        to_used = -scale * sum_g, -0.5 * scale * rstd * sum_gx
        to_mean, to_var = torch.autograd.grad(used, ours, to_used, retain_graph=True)

        n = _count(x, devices)
        dx = centred.mul_((to_var * (2 / n)).view(over))  # in place: `centred` is as large as the batch
        dx = dx.addcmul_(g, scale.view(over)).add_((to_mean / n).view(over)).flatten(0, 1).to(x.dtype)
        dweight = None if weight is None else sum_gx.sum(0).to(weight.dtype)
        dbias = None if bias is None else sum_g.sum(0).to(bias.dtype)
        return dx, dweight, dbias, None, None, None


def _moments(x: Tensor, devices: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, (devices, c) each. Differentiable only where it is compiled."""
    compiling = torch.compiler.is_compiling()
    if devices == 1 and x.device.type in ("cpu", "cuda") and not compiling:
        # torch's own kernel. The running statistics that it updates are scratch; their dtype is the result's.
        scratch = x.new_empty(2, x.shape[1], dtype=_statistics_dtype(x))
        mean, var = torch.ops.aten.batch_norm_update_stats(x, scratch[0], scratch[1], 0.0)
        return mean.unsqueeze(0), var.unsqueeze(0)
    chunks = _per_device(x, devices)
    dims = _reduced(chunks)
    if x.device.type == "cpu" and not compiling:  # torch.var_mean is several times slower here
        mean = chunks.mean(dims)
        return mean, (chunks - mean.view(_per_channel(x))).square_().mean(dims)
    var, mean = torch.var_mean(chunks, dims, correction=0)
    return mean, var


def _normalised(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """x with each virtual device normalised by its own mean and var (devices, c)."""
    weight = None if weight is None else weight.to(mean.dtype)
    bias = None if bias is None else bias.to(mean.dtype)
    if len(mean) == 1 and not torch.compiler.is_compiling():
        return F.batch_norm(x, mean[0], var[0], weight, bias, False, 0.0, eps)
    over = _per_channel(x)
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    y = (_per_device(x, len(mean)) - mean.view(over)) * scale.view(over)
    if bias is not None:
        y = y + bias.view(1, *over[1:])
    return y.flatten(0, 1).to(x.dtype)


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _per_device(x: Tensor, devices: int) -> Tensor:
    """(n, c, ...) -> (devices, n/devices, c, ...) in the dtype of the statistics."""
    return x.view(devices, len(x) // devices, *x.shape[1:]).to(_statistics_dtype(x))


def _per_channel(x: Tensor) -> tuple[int, ...]:
    """The shape in which (devices, c) meets `_per_device(x)`."""
    return (-1, 1, x.shape[1]) + (1,) * (x.dim() - 2)


def _reduced(chunks: Tensor) -> tuple[int, ...]:
    """The dimensions that a statistic of (devices, n/devices, c, ...) runs over."""
    return (1, *range(3, chunks.dim()))


def _count(x: Tensor, devices: int) -> int:
    """Values per channel and device."""
    return x.numel() // (x.shape[1] * devices)
