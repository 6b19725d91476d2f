"""momentum2: self-supervised pretraining of vision backbones on the hardware you have."""

from momentum2.norms import MomentumBatchNorm, SplitBatchNorm, SyncedBatchNorm, convert_norms, shuffled
from momentum2.teacher import MomentumTeacher

__version__ = "0.1.0"

__all__ = [
    "MomentumBatchNorm",
    "MomentumTeacher",
    "SplitBatchNorm",
    "SyncedBatchNorm",
    "__version__",
    "convert_norms",
    "shuffled",
]
