"""MoCo's shuffling BN: a permutation around the key encoder, not a norm."""

from collections.abc import Callable

import torch
from torch import Tensor

from momentum2 import distributed


def shuffled(encoder: Callable[[Tensor], Tensor], x: Tensor, order: Tensor | torch.Generator) -> Tensor:
    """Encode `x` with the samples of all processes dealt out in another order; the result is in x's order.

    A local batch norm inside sees a random part of the global batch, so that its statistics do not tell which
    query a key belongs to. The devices are those of the encoder's own norms (LocalBatchNorm).

    Args:
        encoder: (n, ...) -> (n, ...), sample by sample apart from its norms.
        x: (n, ...), the same n on all processes.
        order: The permutation of the N = n · processes samples, or a CPU generator to draw it from. All
            processes must give the same: the same tensor, or a generator in the same state.
    """
    n = len(x)
    total = n * distributed.world_size()
    if isinstance(order, torch.Generator):
        order = torch.randperm(total, generator=order)
    order = order.to(x.device)
    mine = slice(distributed.rank() * n, (distributed.rank() + 1) * n)
    encoded = encoder(distributed.gather(x)[order[mine]])
    return distributed.gather(encoded)[order.argsort()[mine]]
