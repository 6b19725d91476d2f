"""momentum2: self-supervised pretraining of vision backbones on the hardware you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from momentum2._importing import install

if TYPE_CHECKING:
    from momentum2.api import (
        Embeddings,
        Neighbors,
        RunRow,
        Selection,
        compare_runs,
        detect,
        detect_images,
        doctor,
        embed,
        evaluate_detector,
        evaluate_knn,
        evaluate_linear,
        evaluate_semi,
        export_encoder,
        list_backbones,
        list_recipes,
        log_run,
        plan,
        pretrain,
        recipe,
        reproduce_table,
        search,
        select,
        stats,
        views,
        watch,
        write_report,
    )
    from momentum2.config import Config
    from momentum2.data import Dataset
    from momentum2.errors import SettingError, Stopped, UserError
    from momentum2.methods import Method, Output, TeacherMethod
    from momentum2.norms import LocalBatchNorm, MomentumBatchNorm, SyncedBatchNorm, convert_norms, shuffled
    from momentum2.runs.encoder import load_encoder
    from momentum2.runs.handle import Run
    from momentum2.teacher import MomentumTeacher

__version__ = "0.2.0"

install()

#: Where the public names are that are not in `momentum2.api`. Each is imported at its first use: torch takes seconds,
#: for which `--help` need not wait.
_HOMES = {
    **dict.fromkeys(("SettingError", "Stopped", "UserError"), "momentum2.errors"),
    **dict.fromkeys(("Method", "Output", "TeacherMethod"), "momentum2.methods"),
    **dict.fromkeys(
        ("LocalBatchNorm", "MomentumBatchNorm", "SyncedBatchNorm", "convert_norms", "shuffled"),
        "momentum2.norms",
    ),
    "Config": "momentum2.config",
    "Dataset": "momentum2.data",
    "MomentumTeacher": "momentum2.teacher",
    "Run": "momentum2.runs.handle",
    "load_encoder": "momentum2.runs.encoder",
    "SplitBatchNorm": "momentum2.norms",  # the old name of LocalBatchNorm
}

__all__ = [
    "Config",
    "Dataset",
    "Embeddings",
    "LocalBatchNorm",
    "Method",
    "MomentumBatchNorm",
    "MomentumTeacher",
    "Neighbors",
    "Output",
    "Run",
    "RunRow",
    "Selection",
    "SettingError",
    "Stopped",
    "SyncedBatchNorm",
    "TeacherMethod",
    "UserError",
    "__version__",
    "compare_runs",
    "convert_norms",
    "detect",
    "detect_images",
    "doctor",
    "embed",
    "evaluate_detector",
    "evaluate_knn",
    "evaluate_linear",
    "evaluate_semi",
    "export_encoder",
    "list_backbones",
    "list_recipes",
    "load_encoder",
    "log_run",
    "plan",
    "pretrain",
    "recipe",
    "reproduce_table",
    "search",
    "select",
    "shuffled",
    "stats",
    "views",
    "watch",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES or name in __all__:
        return getattr(import_module(_HOMES.get(name, "momentum2.api")), name)
    if name in ("norms", "teacher"):  # as `momentum2.norms.momentum_norms` after `import momentum2` alone
        return import_module(f"momentum2.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
