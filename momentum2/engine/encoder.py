"""The old place of `load_encoder`."""

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    from momentum2.runs import encoder

    if not hasattr(encoder, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("momentum2.engine.encoder is now momentum2.load_encoder.", FutureWarning, stacklevel=2)
    return getattr(encoder, name)
