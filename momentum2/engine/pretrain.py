"""The old place of `pretrain`."""

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from momentum2.training import pretrain

    if not hasattr(pretrain, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("momentum2.engine.pretrain is now momentum2.pretrain.", FutureWarning, stacklevel=2)
    return getattr(pretrain, name)
