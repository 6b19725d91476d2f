"""Computing in the precision that tensors have."""

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block in which autocast rounds nothing to bf16.

    Some devices have no autocast, such as meta, on which a plan traces a method; there it does nothing.
    """
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
