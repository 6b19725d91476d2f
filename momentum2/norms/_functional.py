"""Batch norm in three moves: take the batch's statistics, decide what to normalize by, normalize.

A batch (n, c, ...) is that of k devices with n/k consecutive samples each. Statistics are (k, c), in fp32
(fp64 for fp64 input), with the biased variance. Norms differ in the middle move alone, a `Statistics`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from momentum2.errors import UserError

#: (mean, var, values per channel and device) of the batch -> (mean, var) to normalize by; differentiable.
Statistics = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]

#: A guess: nobody has measured where the calls begin to cost more than the memory traffic that they save.
FEW_DEVICES = 16


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    statistics: Statistics,
    devices: int = 1,
) -> Tensor:
    """Normalize x (n, c, ...) by what `statistics` makes of its own; gradients flow through those too."""
    if len(x) % devices:
        raise UserError(
            f"A batch of {len(x)} samples cannot be divided among {devices} devices. Choose a batch size that is "
            f"a multiple of {devices}."
        )
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _BatchNorm.apply(x, weight, bias, eps, statistics, devices)  # type: ignore[no-any-return,no-untyped-call]
    return _forward(x, weight, bias, eps, statistics, devices)


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
        @torch.enable_grad()
        def recorded(mean: Tensor, var: Tensor, n: int) -> tuple[Tensor, Tensor]:
            # The middle move is small and may be anything, a collective for instance: autograd has its graph.
            ours = mean.detach().requires_grad_(), var.detach().requires_grad_()
            used = statistics(*ours, n)
            ctx.statistics = ours, used  # type: ignore[attr-defined]
            return used[0].detach(), used[1].detach()

        ctx.eps = eps  # type: ignore[attr-defined]
        ctx.save_for_backward(x, weight, bias)  # type: ignore[arg-type]
        return _forward(x, weight, bias, eps, recorded, devices)

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
        centered = _centered(x, _per_device(x, devices), mean)
        dims = _reduced(x)
        sum_g = g.sum(dims)  # (k, c), as all that follows
        sum_gx = ((g * centered).sum(dims) + (mean - used_mean) * sum_g) * rstd  # Σ g · normalized x
        to_used = -scale * sum_g, -0.5 * scale * rstd * sum_gx
        to_mean, to_var = torch.autograd.grad(used, ours, to_used, retain_graph=True)

        n = _count(x, devices)
        dx = torch.addcmul((to_mean / n).view(over), centered, (to_var * (2 / n)).view(over), out=centered)
        dx = dx.addcmul_(g, scale.view(over)).flatten(0, 1).to(x.dtype)
        dweight = None if weight is None else sum_gx.sum(0).to(weight.dtype)
        dbias = None if bias is None else sum_g.sum(0).to(bias.dtype)
        return dx, dweight, dbias, None, None, None


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: Statistics, devices: int
) -> Tensor:
    compiling, kind, n = torch.compiler.is_compiling(), x.device.type, _count(x, devices)
    dtype = _statistics_dtype(x)
    if weight is not None and weight.dtype != dtype:
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    if ((devices == 1 and kind == "cpu") or kernels_for(x, devices)) and not compiling:
        mean, var = statistics(*_kernel_statistics(x, devices), n)
        parts = [
            F.batch_norm(chunk, mean[i], var[i], weight, bias, False, 0.0, eps)
            for i, chunk in enumerate(x.chunk(devices) if devices > 1 else (x,))
        ]
        return parts[0] if devices == 1 else torch.cat(parts)

    chunks, over = _per_device(x, devices), _per_channel(x)
    if kind == "cpu" and not compiling:
        # x · scale + shift as in torch's own kernel for CPUs, one pass for all devices; a call of that kernel for
        # each of them, with the parts put together, takes twice as long.
        used_mean, used_var = statistics(*_kernel_statistics(x, devices), n)
        scale = (used_var + eps).rsqrt() if weight is None else (used_var + eps).rsqrt() * weight
        shift = -used_mean * scale if bias is None else bias - used_mean * scale
        y = torch.addcmul(shift.view(over), chunks, scale.view(over))
    else:
        var, mean = torch.var_mean(chunks, _reduced(x), correction=0)
        centered = _centered(x, chunks, mean)
        used_mean, used_var = statistics(mean, var, n)
        scale = (used_var + eps).rsqrt() if weight is None else (used_var + eps).rsqrt() * weight
        shift = (mean - used_mean) * scale if bias is None else (mean - used_mean) * scale + bias
        y = torch.addcmul(shift.view(over), centered, scale.view(over), out=None if compiling else centered)
    # Not a view: what follows, such as ReLU(inplace=True), may write into the output.
    return torch.ops.aten._unsafe_view(y, x.shape).to(x.dtype)  # type: ignore[no-any-return]


def kernels_for(x: Tensor, devices: int) -> bool:
    """Whether to call torch's kernels for each device's samples: on CUDA they read and write far less.

    Where there are many devices, there are more calls than that is worth.
    """
    return x.device.type == "cuda" and devices <= FEW_DEVICES and not torch.compiler.is_compiling()


def _kernel_statistics(x: Tensor, devices: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each device's samples, (devices, c), by torch's kernel for batch norm."""
    scratch: tuple[Tensor | None, ...] = (None, None)
    if x.dtype != _statistics_dtype(x):  # updated for nothing; it sets the dtype
        scratch = x.new_empty(2, x.shape[1], dtype=_statistics_dtype(x)).unbind()
    if devices == 1:
        mean, var = torch.ops.aten.batch_norm_update_stats(x, *scratch, 0.0)
        return mean[None], var[None]
    found = [torch.ops.aten.batch_norm_update_stats(c, *scratch, 0.0) for c in x.chunk(devices)]
    return torch.stack([mean for mean, _ in found]), torch.stack([var for _, var in found])


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _per_device(x: Tensor, devices: int) -> Tensor:
    """(n, c, ...) -> (devices, n/devices, c, ...) in the dtype of the statistics."""
    return x.view(devices, len(x) // devices, *x.shape[1:]).to(_statistics_dtype(x))


def _centered(x: Tensor, chunks: Tensor, mean: Tensor) -> Tensor:
    """`chunks = _per_device(x)` less the mean (devices, c), in the memory of chunks where that is not x's."""
    own = chunks.dtype != x.dtype and not torch.compiler.is_compiling()
    return torch.sub(chunks, mean.view(_per_channel(x)), out=chunks if own else None)


def _per_channel(x: Tensor) -> tuple[int, ...]:
    """The shape in which (devices, c) meets `_per_device(x)`."""
    return (-1, 1, x.shape[1]) + (1,) * (x.dim() - 2)


def _reduced(x: Tensor) -> tuple[int, ...]:
    """The dimensions of `_per_device(x)` that a statistic runs over: all but devices and channels."""
    return (1, *range(3, x.dim() + 1))


def _count(x: Tensor, devices: int) -> int:
    """Values per channel and device."""
    return x.numel() // (x.shape[1] * devices)
