"""MoCo's shuffling BN: a permutation around the key encoder, not a norm."""

from collections.abc import Callable

import torch
from torch import Tensor

from momentum2 import distributed


@torch.library.custom_op("momentum2::permutation", mutates_args=("state",), device_types="cpu")
def draw_permutation(state: Tensor, n: int) -> Tensor:
    """A permutation of n by the generator whose state this is, which moves on; a compiled network can call it."""
    generator = torch.Generator()
    generator.set_state(state)
    order = torch.randperm(n, generator=generator)
    state.copy_(generator.get_state())
    return order


@draw_permutation.register_fake
def _(state: Tensor, n: int) -> Tensor:
    return state.new_empty(n, dtype=torch.int64)


def shuffled(encoder: Callable[[Tensor], Tensor], x: Tensor, order: Tensor | torch.Generator) -> Tensor:
    """Encode `x` with the samples of all processes distributed in another order; the result is in x's order.

    A local batch norm inside sees a random part of the global batch, so that its statistics do not tell which
    query a key belongs to. The devices are those of the encoder's own norms (LocalBatchNorm). Each sample is sent to
    one process and back.

    Args:
        encoder: (n, ...) -> (n, ...), sample by sample apart from its norms.
        x: (n, ...), the same n on all processes.
        order: The permutation of the N = n · processes samples, fastest on the CPU; or a CPU generator to draw it from.
            All processes must pass the same: the same tensor, or a generator in the same state.
    """
    n, world, rank = len(x), distributed.world_size(), distributed.rank()
    if isinstance(order, torch.Generator):
        order = torch.randperm(n * world, generator=order)
    if world == 1:
        there, back = _on(x.device, torch.stack([order, order.argsort()]))
        return encoder(x[there])[back]
    # Row r of `wanted` are the samples that process r encodes; sample i is here if i // n is this process.
    wanted = order.to("cpu").view(world, n)
    own = wanted // n == rank
    sent, received = own.sum(1).tolist(), (wanted[rank] // n).bincount(minlength=world).tolist()
    leaving = wanted[own] - rank * n  # by the process that gets them, in its order
    arriving = (wanted[rank] // n).argsort(stable=True)  # by the process that they come from
    index = torch.stack([leaving, arriving.argsort(), arriving, leaving.argsort()])
    leave, arrange, sort, place = _on(x.device, index)
    encoded = encoder(distributed.exchange(x[leave], sent, received)[arrange])
    return distributed.exchange(encoded[sort], received, sent)[place]


def _on(device: torch.device, index: Tensor) -> tuple[Tensor, ...]:
    """The rows of an index on the device, which is not waited for."""
    if device.type == "cuda" and index.device.type == "cpu":
        index = index.pin_memory()
    return index.to(device, non_blocking=True).unbind()
