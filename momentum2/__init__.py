"""momentum2: self-supervised pretraining of vision backbones on the hardware you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from momentum2.norms import LocalBatchNorm, MomentumBatchNorm, SyncedBatchNorm, convert_norms, shuffled
    from momentum2.runs.encoder import load_encoder
    from momentum2.teacher import MomentumTeacher

__version__ = "0.2.0"

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


#: Where the names are. Each is imported at its first use: torch takes seconds, which `momentum2 --help` need not wait.
_HOMES = {
    "LocalBatchNorm": "momentum2.norms",
    "MomentumBatchNorm": "momentum2.norms",
    "MomentumTeacher": "momentum2.teacher",
    "SplitBatchNorm": "momentum2.norms",  # the old name of LocalBatchNorm
    "SyncedBatchNorm": "momentum2.norms",
    "convert_norms": "momentum2.norms",
    "load_encoder": "momentum2.runs.encoder",
    "shuffled": "momentum2.norms",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in (
        "norms",
        "teacher",
    ):  # as `momentum2.norms.momentum_norms`, after no more than `import momentum2`
        return import_module(f"momentum2.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
