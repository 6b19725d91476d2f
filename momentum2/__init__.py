"""momentum2: self-supervised pretraining of vision backbones on the hardware you have."""

from typing import TYPE_CHECKING, Any

from momentum2.norms import LocalBatchNorm, MomentumBatchNorm, SyncedBatchNorm, convert_norms, shuffled
from momentum2.teacher import MomentumTeacher

if TYPE_CHECKING:
    from momentum2.engine.encoder import load_encoder

__version__ = "0.1.0"

__all__ = [
    "LocalBatchNorm",
    "MomentumBatchNorm",
    "MomentumTeacher",
    "SyncedBatchNorm",
    "__version__",
    "convert_norms",
    "load_encoder",
    "shuffled",
]


def __getattr__(name: str) -> Any:
    if name == "load_encoder":  # imported at its first use: it needs torchvision, which Momentum BN does not
        from momentum2.engine.encoder import load_encoder

        return load_encoder
    if name == "SplitBatchNorm":  # its old name
        from momentum2 import norms

        return norms.SplitBatchNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
