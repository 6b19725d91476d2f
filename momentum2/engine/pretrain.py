"""The old place of `pretrain`."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from momentum2.config import Config


def pretrain(
    config: Config, out: Path, resume: Any = "auto", make_score: Callable[[Config], Any] | None = None
) -> bool:
    """`momentum2.pretrain`; returns whether the run is finished."""
    from momentum2.api import pretrain

    warnings.warn("momentum2.engine.pretrain is now momentum2.pretrain.", FutureWarning, stacklevel=2)
    return pretrain(config, out, resume=resume).finished
