"""Metrics over time as the page plots them: few enough points, no peak lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from momentum2.runs.handle import Snapshot
from momentum2.runs.metrics import FLOORS

Floats = NDArray[np.float64]

#: Buckets into which a longer series is divided; each keeps its lowest and highest value.
BUCKETS = 1000


@dataclass(frozen=True)
class Panel:
    """One small plot: which metric, what it is called, and what to look for."""

    metric: str
    title: str
    hint: str
    floors: tuple[tuple[str, str], ...] = ()  # metrics that are drawn beside it, and their words


CURVES = (
    Panel("loss", "loss", "falls, then flattens"),
    Panel("knn_top1", "kNN top-1, %", "rises above the floors (dotted)", tuple(FLOORS.items())),
    Panel("lr", "learning rate", "warm-up, then cosine"),
    Panel("m", "m: student's share in the teacher", "falls to 0, or constant"),
    Panel(
        "alpha",
        "α: batch's share in the statistics",
        "falls to 0, or constant; auto: falls where the teacher slows down (dotted: smallest and largest of all norms)",
        (("alpha_min", "smallest"), ("alpha_max", "largest")),
    ),
    Panel("grad_norm", "gradient norm", "no explosions"),
)
HEALTH = (
    Panel("z_std", "spread of the outputs", "near 1; 0 is collapse"),
    Panel("z_rank", "effective rank of the outputs", "high; 1 is collapse"),
    Panel("statistics_drift", "drift of the statistics", "small and steady"),
    Panel("data_wait", "share of time waiting for data", "near 0"),
    Panel("images_per_second", "images per second", "steady"),
    Panel("memory_gb", "peak memory, GB", "flat"),
)


def series(run: Snapshot) -> dict[str, dict[str, list[float | None]]]:
    """`{metric: {"step": […], "images": […], "minutes": […], "value": […]}}` of all panels' metrics that a run has."""
    steps, seconds = (np.array(part, float) for part in zip(*run.seconds(), strict=True))
    found = {}
    metrics = [name for panel in (*CURVES, *HEALTH) for name in (panel.metric, *dict(panel.floors))]
    for metric in metrics:
        rows = [(r["step"], r[metric]) for r in run.records if metric in r]
        if rows:
            step, value = thin(*(np.array(part, float) for part in zip(*rows, strict=True)))
            found[metric] = {
                "step": _numbers(step),
                "images": _numbers(step * run.config.train.batch_size),
                "minutes": _numbers(np.interp(step, steps, seconds) / 60),
                "value": _numbers(value),
            }
    return found


def thin(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """At most 3·BUCKETS of the points (x, y): of each stretch the extremes and, if it has one, a gap."""
    if len(x) <= 2 * BUCKETS:
        return x, y
    finite = np.isfinite(y)
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), BUCKETS):
        kept |= {int(part[np.where(finite[part], y[part], np.inf).argmin()])}
        kept |= {int(part[np.where(finite[part], y[part], -np.inf).argmax()])}
        kept |= {int(part[finite[part].argmin()])} if not finite[part].all() else set()
    chosen = sorted(kept)
    return x[chosen], y[chosen]


def alarms(run: Snapshot) -> list[dict[str, Any]]:
    """The alarms with their place on each time axis."""
    steps, seconds = zip(*run.seconds(), strict=True)
    return [
        {
            "step": step,
            "images": step * run.config.train.batch_size,
            "minutes": float(np.interp(step, steps, seconds)) / 60,
            "text": text,
        }
        for step, text in run.alarms
    ]


def _numbers(values: Sequence[float] | Floats) -> list[float | None]:
    """Six digits are more than a screen shows; what is no number becomes a gap."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values]
