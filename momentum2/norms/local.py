"""Local BN: each device's own samples, whatever process it is in."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2.norms._functional import batch_norm, kernels_for
from momentum2.norms.base import PlainBatchNorm


class LocalBatchNorm(PlainBatchNorm):
    """Batch norm of k devices in one batch: every n/k consecutive samples have their own statistics.

    Outputs and gradients are those of k separate replicas. The running statistics are the first replica's, as
    when a run on k devices saves its first; evaluation mode is plain batch norm on them.

    Args:
        num_features: c of an input (n, c, ...) of 2 to 5 dimensions; n must be a multiple of `devices`.
        eps: Added to the variance.
        statistics_momentum: Weight of the current batch in the running statistics; None for their plain mean.
        affine: Learn a weight and a bias per channel.
        devices: k.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        statistics_momentum: float | None = 0.1,
        affine: bool = True,
        devices: int = 1,
    ) -> None:
        super().__init__(num_features, eps, statistics_momentum, affine)
        self.devices = devices

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.devices == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if kernels_for(input, self.devices) and len(input) % self.devices == 0:
            first, *rest = input.chunk(self.devices)
            others = [F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps) for x in rest]
            return self.after(torch.cat([_BatchNorm.forward(self, first), *others]))
        return self.after(batch_norm(input, self.weight, self.bias, self.eps, self._statistics, self.devices))

    def _statistics(self, mean: Tensor, var: Tensor, n: int) -> tuple[Tensor, Tensor]:
        self._track(mean[0], var[0] * (n / max(n - 1, 1)))
        return mean, var

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, devices={self.devices}"  # type: ignore[no-untyped-call]
