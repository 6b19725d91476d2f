"""Alarms in words: what is going wrong with a run, reported once while it lasts."""

from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median

from momentum2.config import MonitorConfig

#: Logged steps before a step time can be called slow, and how many are remembered.
WARM_UP, REMEMBERED = 5, 1000


class Alarms:
    """Watches the logged `z_std`, `z_rank`, `data_wait` and `step_time`; absent ones are not watched."""

    def __init__(self, monitor: MonitorConfig) -> None:
        self.monitor = monitor
        self._low = {"z_std": 0, "z_rank": 0}  # logged steps in a row
        self._step_times: deque[float] = deque(maxlen=REMEMBERED)
        self._raised: set[str] = set()
        self._said_worse = False

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """A sentence for each thing that goes wrong and did not at the last call."""
        found = dict(self._find(metrics))
        new = [f"Step {step}: {sentence}" for name, sentence in found.items() if name not in self._raised]
        self._raised = set(found)
        return new

    def check_start(self, step: int, found: Mapping[str, float]) -> list[str]:
        """A sentence if online kNN has fallen below that of the weights that the run started from, once."""
        now, start = found.get("knn_top1"), found.get("floor_start")
        if now is None or start is None or now >= start - found["knn_interval"] or self._said_worse:
            return []
        self._said_worse = True
        return [
            f"Step {step}: adapting lowered kNN from {start:.1f}% to {now:.1f}%. Use a lower learning rate, or more "
            "epochs with a frozen encoder."
        ]

    def _find(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        monitor = self.monitor
        limits = {
            "z_std": (monitor.collapse_std, "spread of the outputs"),
            "z_rank": (monitor.collapse_rank, "effective rank of the outputs"),
        }
        for name, (limit, words) in limits.items():
            if name in metrics:
                self._low[name] = self._low[name] + 1 if metrics[name] < limit else 0
                if self._low[name] >= monitor.collapse_steps:
                    yield (
                        name,
                        f"the representation has collapsed: the {words} is {metrics[name]:.3g}, "
                        f"below {limit:g} for {self._low[name]} logged steps. "
                        "Check the predictor, the norms and the learning rate.",
                    )
        if metrics.get("data_wait", 0.0) > monitor.wait_fraction:
            yield (
                "data_wait",
                f"{metrics['data_wait']:.0%} of the time is spent waiting for images. "
                "Increase data.workers, or set data.cache to on.",
            )
        if "step_time" in metrics:
            seconds = metrics["step_time"]
            if len(self._step_times) >= WARM_UP:
                usual = median(self._step_times)
                if seconds > monitor.slow_step * usual:
                    yield "step_time", f"a step took {seconds:.3g} s, {seconds / usual:.1f} times the median."
            self._step_times.append(seconds)
