"""Synced BN: one batch over all processes."""

import torch
from torch import Tensor

from momentum2 import distributed
from momentum2.norms._functional import batch_norm
from momentum2.norms.base import PlainBatchNorm


class SyncedBatchNorm(PlainBatchNorm):
    """Batch norm over the samples of all processes, on gloo (CPU) and nccl.

    Outputs, gradients and running statistics are those of one process with the whole batch, also when the
    processes have different numbers of samples. In a single process it is plain batch norm, at its speed.

    Args:
        num_features: c of an input (n, c, ...) of 2 to 5 dimensions.
        eps: Added to the variance.
        statistics_momentum: Weight of the current batch in the running statistics; None for their plain mean.
        affine: Learn a weight and a bias per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        statistics_momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps, statistics_momentum, affine)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or distributed.world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        return self.after(batch_norm(input, self.weight, self.bias, self.eps, self._statistics))

    def _statistics(self, mean: Tensor, var: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Those of all processes, from the (1, c) of n values per channel here; one collective."""
        packed = torch.cat([mean, var, mean.new_full((1, 1), n)], dim=1)
        means, variances, ns = torch.split(
            distributed.gather(packed), [mean.shape[1], mean.shape[1], 1], dim=1
        )
        total = ns.sum()
        share = ns / total  # (processes, 1)
        mean = (share * means).sum(0, keepdim=True)
        # Within the processes and between them: no difference of large squares.
        var = (share * (variances + (means - mean).square())).sum(0, keepdim=True)
        self._track(mean[0], var[0] * (total / (total - 1).clamp(min=1)))
        return mean, var
