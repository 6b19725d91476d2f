"""What all our batch norms share: one class for every number of dimensions, and torch's own state."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class PlainBatchNorm(_BatchNorm):
    """torch's batch norm in one class for inputs of 2 to 5 dimensions: (n, c) to (n, c, d, h, w).

    Some networks, most of timm's, have the dropout and the activation that follow a norm as its children `drop` and
    `act`. A norm that takes the place of such a one has them too, and they are the last that its forward does.
    """

    drop: nn.Module | None
    act: nn.Module | None

    # Always there: none of our norms goes without running statistics.
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, num_features: int, eps: float, momentum: float | None, affine: bool) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.drop = self.act = None  # not in the class, which would hide the children

    def after(self, y: Tensor) -> Tensor:
        """What follows the norm inside the same module."""
        if self.drop is not None:
            y = self.drop(y)
        return y if self.act is None else self.act(y)

    def forward(self, input: Tensor) -> Tensor:
        return self.after(super().forward(input))

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(
                f"expected an input of 2 to 5 dimensions with channels at dim 1, got {input.dim()}"
            )

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        """torch's rule for the running statistics, given the batch's, (c,) each."""
        self.num_batches_tracked.add_(1)
        weight = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.copy_(weight * mean + (1 - weight) * self.running_mean)
        self.running_var.copy_(weight * unbiased_var + (1 - weight) * self.running_var)
