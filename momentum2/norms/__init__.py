"""Batch norms: whose samples (local, synced) × whose statistics (the batch's, momentum)."""

import warnings
from typing import Any

from momentum2.norms.convert import convert_norms
from momentum2.norms.local import LocalBatchNorm
from momentum2.norms.momentum import MomentumBatchNorm, momentum_norms
from momentum2.norms.shuffle import shuffled
from momentum2.norms.synced import SyncedBatchNorm

__all__ = [
    "LocalBatchNorm",
    "MomentumBatchNorm",
    "SyncedBatchNorm",
    "convert_norms",
    "momentum_norms",
    "shuffled",
]


def __getattr__(name: str) -> Any:
    if name == "SplitBatchNorm":
        warnings.warn("SplitBatchNorm is now called LocalBatchNorm.", FutureWarning, stacklevel=2)
        return LocalBatchNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
