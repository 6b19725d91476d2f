"""The first screen: is it learning, is it healthy, how good is it?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from momentum2.methods import METHODS
from momentum2.report.curves import CURVES, HEALTH
from momentum2.report.html import duration, escape, number, table
from momentum2.runs.handle import Snapshot
from momentum2.runs.metrics import floors_in, last_knn
from momentum2.runs.results import below_floors


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
    knn = last_knn(run.records)
    if knn:
        yield "online kNN top-1", _online(knn)
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
    knn = [r for r in run.records if "knn_top1" in r]
    if len(knn) > 1 and knn[0]["step"] == 0:
        yield _progress(knn)
    if knn:
        verdict = below_floors(knn[-1]["knn_top1"], floors_in(knn[-1]))
        yield from [verdict] if verdict else []
    else:
        yield (
            "No online kNN: the loss alone does not show whether it is learning. Set eval_data to labeled images, and "
            "monitor.knn_every."
        )
    for result in run.results.values():
        best, name = max(((top1, name) for name, top1 in result["floors"].items()), default=(None, ""))
        if best is not None and result["network"] in ("teacher", "student"):
            above = result["accuracy"]["top1"] - best
            where = "above" if above >= 0 else "below"
            what = f"{result['evaluation']} on {result['data']}"
            yield f"{what}: {abs(above):.1f} points {where} the best floor, {name} ({best:.1f}%)."
    if run.alarms:
        yield f"{len(run.alarms):,} alarm(s); the last: {run.alarms[-1][1]}"
    elif run.records:
        yield "No alarms: no collapse, no waiting for data and no slow steps were detected."
    if run.bad_images:
        yield f"{run.bad_images:,} images could not be read; bad_images.txt lists them."


def _progress(knn: Sequence[Mapping[str, float]]) -> str:
    """Whether the last online kNN is further above the untrained network than their intervals explain."""
    first, last = knn[0], knn[-1]
    # With as many neighbors as the last one had; older runs have it at step 0 alone.
    start, began = last.get("floor_random", first["knn_top1"]), "untrained"
    if "floor_start" in last:
        start, began = last["floor_start"], "the weights that it started from"
    gain = last["knn_top1"] - start
    change = f"online kNN went from {start:.1f}% ({began}) to {last['knn_top1']:.1f}% ({gain:+.1f} points"
    if "knn_interval" not in first or "knn_interval" not in last:  # a run of version 0.1
        return f"{change[0].upper()}{change[1:]}). The number of test images is not recorded."
    within = math.hypot(first["knn_interval"], last["knn_interval"])
    how = "It is learning" if gain > within else "No learning is visible"
    if "floor_start" in last and gain < -within:
        how = "Adapting has made it worse"
    return f"{how}: {change}, of which {within:.1f} may be chance)."


def results_table(runs: Sequence[Snapshot]) -> str:
    """What online kNN and `evaluate` found, side by side, with the floors; empty if there is nothing."""
    rows: list[tuple[str, ...]] = []

    def add(
        name: str,
        values: Sequence[str],
        floors: Sequence[Mapping[str, float]],
        measured: Sequence[Mapping[str, Any]],
    ) -> None:
        rows.append((name, *values))
        below = {f"  floor: {floor}": floor for of_run in floors for floor in of_run}
        beside = [[of_run.get(floor) for of_run in floors] for floor in below.values()]
        chance = [found.get("chance") for found in measured]
        for label, found in zip([*below, "  chance"], [*beside, chance], strict=True):
            if any(v is not None for v in found):
                rows.append((label, *(f"{v:.1f}%" if v is not None else "–" for v in found)))

    online = [last_knn(run.records) for run in runs]
    if any(floors_in(record) for record in online):
        add("online kNN", [_online(record) for record in online], [floors_in(r) for r in online], online)
    for name in dict.fromkeys(name for run in runs for name in run.results):
        results = [run.results.get(name) for run in runs]
        floors = [result["floors"] if result else {} for result in results]
        accuracies = [result["accuracy"] if result else {} for result in results]
        add(name, [_accuracy(result) for result in results], floors, accuracies)
    return table(("top-1", *(run.name for run in runs)), rows, "Results and floors") if rows else ""


def _online(record: Mapping[str, float]) -> str:
    """An online kNN with its interval and numbers of images, as far as the run has noted them."""
    if not record:
        return "–"
    within = f" ± {record['knn_interval']:.1f}" if "knn_interval" in record else ""
    tests = f" on {record['knn_tests']:,.0f} images" if "knn_tests" in record else ""
    images = f", {record['knn_images']:,.0f} neighbors" if "knn_images" in record else ""
    return f"{record['knn_top1']:.1f}%{within}{tests}{images}"


def _accuracy(result: dict[str, dict[str, float]] | None) -> str:
    if result is None:
        return "–"
    a = result["accuracy"]
    return f"{a['top1']:.1f}% ({a['low']:.1f} to {a['high']:.1f}) on {a['images']:,} images"


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
