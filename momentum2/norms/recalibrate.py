"""Batch-norm statistics measured again, over given data."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2.errors import UserError


@dataclass
class _Moments:
    """Mean and variance of all values seen so far, per channel, in float64 on the CPU."""

    count: int
    mean: Tensor
    var: Tensor

    def add(self, x: Tensor) -> None:
        """Merge the values of a batch (n, c, ...) in."""
        dims = [dim for dim in range(x.dim()) if dim != 1]
        var, mean = (m.cpu().double() for m in torch.var_mean(x.float(), dims, correction=0))
        count = x.numel() // x.shape[1]
        total = self.count + count
        share, shift = count / total, mean - self.mean
        self.var = (1 - share) * self.var + share * var + share * (1 - share) * shift**2
        self.mean = self.mean + share * shift
        self.count = total


@torch.no_grad()
def recalibrate(module: nn.Module, batches: Iterable[Tensor]) -> None:
    """Replace the running statistics of every batch norm by those of one pass over `batches` (n, 3, h, w).

    Each norm gets the exact mean and (biased) variance of all values that reach it while every norm
    normalizes with the statistics of the batch, as in training. With a single batch, evaluation mode then
    gives the very outputs of training mode. Everything else, dropout too, is in evaluation mode meanwhile.
    Of a network without batch norm nothing is measured.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    if not norms:
        return
    modes = [(m, m.training) for m in module.modules()]
    found = {norm: _Moments(0, torch.zeros(()), torch.zeros(())) for norm in norms}
    hooks = [
        norm.register_forward_pre_hook(lambda norm, inputs: found[norm].add(inputs[0])) for norm in norms
    ]
    seen = 0
    try:
        module.eval()
        for norm in norms:
            norm.training = True  # not `train`, which would reach the dropout inside some
        for batch in batches:
            module(batch)
            seen += 1
    finally:
        for hook in hooks:
            hook.remove()
        for m, mode in modes:
            m.training = mode
    if not seen:
        raise UserError("There are no images to recalibrate batch norm with.")
    for norm, moments in found.items():
        norm.running_mean.copy_(moments.mean)  # type: ignore[union-attr]
        norm.running_var.copy_(moments.var)  # type: ignore[union-attr]
        norm.num_batches_tracked.fill_(seen)  # type: ignore[union-attr]
