"""The first screen: is it learning, is it healthy, how good is it?"""

import math
from collections.abc import Iterator, Sequence

from momentum2.methods import METHODS
from momentum2.report.curves import CURVES, HEALTH
from momentum2.report.html import duration, escape, number, table
from momentum2.runs.handle import Snapshot


def headline(runs: Sequence[Snapshot]) -> str:
    """One card per run."""
    return f'<div class="cards">{"".join(_card(i, run) for i, run in enumerate(runs))}</div>'


def _card(place: int, run: Snapshot) -> str:
    config = run.config
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(run)
    )
    words = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict(run))
    data = f"{config.data.name}{f' ({config.data.root})' if config.data.root else ''}"
    what = (
        f"{config.method.name} with {config.method.teacher_norm} teacher norm, "
        if config.method.name in METHODS and METHODS[config.method.name].has_teacher
        else f"{config.method.name}, "
    )
    network = f"{config.model.backbone} of width {config.model.width:g}, {config.data.image_size} px, "
    return (
        f'<article class="card" data-color="{place}"><h3>{escape(run.name)}</h3>'
        f"<p>{escape(what + network + data)}</p>"
        f'<dl class="facts">{facts}</dl><ul class="verdict">{words}</ul></article>'
    )


def _facts(run: Snapshot) -> Iterator[tuple[str, str]]:
    of = f" of {run.steps:,}" if run.steps else ""
    yield "state", "finished" if run.finished else f"step {run.step:,}{of}"
    knn = run.last("knn_top1")
    if knn is not None:
        yield "online kNN top-1", f"{knn:.1f}%"
    for result in run.results.values():
        if result["network"] in ("teacher", "student"):
            yield f"{result['evaluation']} top-1", f"{result['accuracy']['top1']:.1f}%"
    yield "loss", number(run.last("loss"))
    seconds = run.seconds()[-1][1]
    yield "training time", duration(seconds)
    if seconds > 0:
        yield "images per second", number(run.step * run.config.train.batch_size / seconds, 3)
    step_time = run.last("step_time")
    if not run.finished and run.steps and step_time is not None and math.isfinite(step_time):
        yield "time left", duration((run.steps - run.step) * step_time)


def verdict(run: Snapshot) -> Iterator[str]:
    """Sentences that say whether the run is learning and healthy."""
    knn = [(r["step"], r["knn_top1"]) for r in run.records if "knn_top1" in r]
    if len(knn) > 1 and knn[0][0] == 0:
        gain = knn[-1][1] - knn[0][1]
        how = "It is learning" if gain > 1 else "It has not learned yet"
        began = "untrained"
        if run.config.model.pretrained or run.config.model.weights:
            began = "the weights that it started from"
            how = "Adapting has made it worse" if gain < -1 else how
        yield (
            f"{how}: online kNN went from {knn[0][1]:.1f}% ({began}) to {knn[-1][1]:.1f}% "
            f"({gain:+.1f} points)."
        )
    elif not knn:
        yield (
            "No online kNN: the loss alone does not show whether it is learning. Set eval_data to labeled images, and "
            "monitor.knn_every."
        )
    for result in run.results.values():
        best = max(result["floors"].values(), default=None)
        if best is not None and result["network"] in ("teacher", "student"):
            above = result["accuracy"]["top1"] - best
            where = "above" if above >= 0 else "below"
            yield f"{result['evaluation']} on {result['data']}: {abs(above):.1f} points {where} the best floor."
    if run.alarms:
        yield f"{len(run.alarms):,} alarm(s); the last: {run.alarms[-1][1]}"
    elif run.records:
        yield "No alarms: no collapse, no waiting for data, no slow steps were noticed."
    if run.bad_images:
        yield f"{run.bad_images:,} images could not be read; bad_images.txt lists them."


def results_table(runs: Sequence[Snapshot]) -> str:
    """What `evaluate` found, side by side, with the floors; empty if there is nothing."""
    names = list(dict.fromkeys(name for run in runs for name in run.results))
    if not names:
        return ""
    rows: list[tuple[str, ...]] = []
    for name in names:
        found = [run.results.get(name) for run in runs]
        rows.append((name, *(_accuracy(result) for result in found)))
        floors = dict.fromkeys(floor for result in found if result for floor in result["floors"])
        for floor in floors:
            values = (result["floors"].get(floor) if result else None for result in found)
            rows.append((f"  floor: {floor}", *(f"{v:.1f}%" if v is not None else "–" for v in values)))
    return table(("top-1", *(run.name for run in runs)), rows, "Results of momentum2 evaluate")


def _accuracy(result: dict[str, dict[str, float]] | None) -> str:
    if result is None:
        return "–"
    a = result["accuracy"]
    return f"{a['top1']:.1f}% ({a['low']:.1f} to {a['high']:.1f})"


def values_table(runs: Sequence[Snapshot]) -> str:
    """The curves in numbers, for those who cannot see them."""
    rows = []
    for panel in (*CURVES, *HEALTH):
        for run in runs:
            values = [r[panel.metric] for r in run.records if panel.metric in r]
            finite = [v for v in values if math.isfinite(v)]
            if finite:
                numbers = (values[0], values[-1], min(finite), max(finite))
                rows.append((panel.title, run.name, *(number(v) for v in numbers)))
    return table(("metric", "run", "first", "last", "lowest", "highest"), rows, "The curves in numbers")


def alarm_list(runs: Sequence[Snapshot]) -> str:
    """All alarms in words."""
    several = len(runs) > 1
    items = [
        f"<li>{escape(f'{run.name}: ' if several else '')}{escape(sentence)}</li>"
        for run in runs
        for _, sentence in run.alarms
    ]
    return f'<ol class="alarms">{"".join(items)}</ol>' if items else "<p>No alarms.</p>"
