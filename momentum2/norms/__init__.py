"""Batch norms: whose samples (local, split, synced) × whose statistics (the batch's, momentum)."""

from momentum2.norms.base import PlainBatchNorm
from momentum2.norms.convert import convert_norms
from momentum2.norms.momentum import MomentumBatchNorm, momentum_norms
from momentum2.norms.shuffle import shuffled
from momentum2.norms.split import SplitBatchNorm
from momentum2.norms.synced import SyncedBatchNorm

__all__ = [
    "MomentumBatchNorm",
    "PlainBatchNorm",
    "SplitBatchNorm",
    "SyncedBatchNorm",
    "convert_norms",
    "momentum_norms",
    "shuffled",
]
