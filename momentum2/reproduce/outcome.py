"""The results of a table's runs: read from their directories, written as JSON, Markdown and a plot."""

import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from momentum2 import __version__
from momentum2.errors import UserError
from momentum2.files import read_json, whole_file
from momentum2.reproduce.rows import Row, Table, duration
from momentum2.reproduce.verdicts import judge
from momentum2.runs.metrics import read_metrics
from momentum2.runs.names import METRICS, RESULTS
from momentum2.runs.results import RANDOM, read_results

_DIGITS = {"seconds": 3}
_NAMES = {"top-1": "top-1 %", "top-5": "top-5 %", "kNN": "kNN %", "seconds": "s/iter"}


@dataclass(frozen=True)
class Outcome:
    """One row with one seed.

    Args:
        numbers: By column.
        source: The results.json that the headline is from.
    """

    numbers: dict[str, float]
    source: Path


def read_outcome(row: Row, out: Path, seed: int) -> Outcome | None:
    """The numbers of a row with a seed, or None if it is not finished."""
    run = row.pretraining.run(out, seed)
    if row.evaluation.detects:
        return _detector(row.detector(out, seed) / RESULTS)
    found = {
        entry["network"]: entry
        for entry in read_results(run / RESULTS).values()
        if entry["evaluation"] == row.evaluation.result and entry.get("settings", {}).get("seed") == seed
    }
    entry = found.get(row.evaluation.network or RANDOM)
    if entry is None:
        return None
    top5 = entry["accuracy"].get("top5")  # none where there are five classes or fewer
    accuracy = {"top-1": float(entry["accuracy"]["top1"])} | ({} if top5 is None else {"top-5": float(top5)})
    return Outcome(accuracy | _watched(run), run / RESULTS)


def _detector(path: Path) -> Outcome | None:
    if not path.exists():
        return None
    try:
        found = read_json(path)
        numbers = {
            f"{name} {score}": 100 * float(found[kind][score])
            for kind, name in (("bbox", "box"), ("segm", "mask"))
            for score in ("AP", "AP50", "AP75")
            if kind in found and found[kind][score] is not None
        }
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path} is not a result of a detector. Move it away.") from None
    return Outcome(numbers, path)


def _watched(run: Path) -> dict[str, float]:
    """What training itself measured: the last kNN accuracy and the median time of a step."""
    records = read_metrics(run / METRICS)
    knn = [float(r["knn_top1"]) for r in records if "knn_top1" in r]
    times = [float(r["step_time"]) for r in records if "step_time" in r]
    numbers = {"kNN": knn[-1]} if knn else {}
    return numbers | ({"seconds": median(times)} if times else {})


def collect(
    table: Table, out: Path, seconds: dict[str, float] | None, commands: Callable[[Row, int], list[str]]
) -> dict[str, Any]:
    """All that is known so far, as it is written to TABLE.json.

    Args:
        table: The table.
        out: Where its runs are.
        seconds: Seconds per iteration by the name of the pretraining, as measured in turns; None for those of the runs.
        commands: The commands of a row with a seed, as text.
    """
    rows: list[dict[str, Any]] = []
    for row in table.rows:
        outcomes = {
            seed: found
            for seed in _seeds(row.pretraining.run(out, 0).parent)
            if (found := read_outcome(row, out, seed))
        }
        columns = {
            name: [o.numbers[name] for o in outcomes.values() if name in o.numbers] for name in table.columns
        }
        if seconds is not None and "seconds" in columns:
            name = row.pretraining.name
            columns["seconds"] = [seconds[name]] if name in seconds else []
        rows.append(
            {
                "row": row.key,
                "label": row.label,
                "paper": dict(row.paper),
                "note": row.note,
                "mean": {name: mean(values) for name, values in columns.items() if values},
                "std": {name: stdev(values) for name, values in columns.items() if len(values) > 1},
                "seeds": [
                    {
                        "seed": seed,
                        "numbers": {
                            name: value
                            for name, value in found.numbers.items()
                            if seconds is None or name != "seconds"
                        },
                        "results": str(found.source.relative_to(out)),
                        "commands": commands(row, seed),
                    }
                    for seed, found in outcomes.items()
                ],
            }
        )
    return {
        "table": table.name,
        "scale": table.scale,
        "epochs": sorted({row.pretraining.epochs for row in table.rows}),
        "variant": list(table.variant),
        "title": table.title,
        "question": table.question,
        "columns": list(table.columns),
        "rows": rows,
        "cited": [
            {"row": row.key, "label": row.label, "paper": dict(row.paper), "note": row.note}
            for row in table.cited
        ],
        "verdicts": _verdicts(table, rows),
        "floors": _floors(out, table),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """What numbers were computed with."""
    return {
        "momentum2": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _verdicts(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is known of each claim: the paper's effect, and a verdict by each accuracy that both rows have."""
    by_key = {row["row"]: row for row in rows}
    found = []
    for claim in table.claims:
        better, other = by_key[claim.better], by_key[claim.other]
        first, second = ({s["seed"]: s["numbers"] for s in row["seeds"]} for row in (better, other))
        entry: dict[str, Any] = {**asdict(claim), "paper": _effect(better["paper"], other["paper"])}
        for column in ("top-1", "kNN"):
            pairs = [
                first[seed][column] - second[seed][column]
                for seed in sorted(first.keys() & second.keys())
                if column in first[seed] and column in second[seed]
            ]
            if pairs:
                entry[column] = asdict(judge(pairs, claim.margin))
        found.append(entry)
    return found


def _effect(better: dict[str, float], other: dict[str, float]) -> float | None:
    known = "top-1" in better and "top-1" in other
    return round(better["top-1"] - other["top-1"], 2) if known else None


def _seeds(runs: Path) -> list[int]:
    """The seeds of which there are runs."""
    names = [path.name for path in runs.glob("seed-*") if path.is_dir()]
    return sorted(int(name.removeprefix("seed-")) for name in names if re.fullmatch(r"seed-\d+", name))


def _floors(out: Path, table: Table) -> dict[str, float]:
    """top-1 of random initialization and raw pixels, which are measured with one run and hold for all on its data."""
    linear = {row.evaluation.result for row in table.rows if row.evaluation.verb == "evaluate linear"}
    recipes = {row.pretraining.name.split()[0] for row in table.rows}
    floors: dict[str, float] = {}
    for path in sorted(out.glob(f"runs/*/*/{RESULTS}")):
        recipe = path.parent.parent.name.split(",")[0]
        for entry in read_results(path).values():
            if entry["evaluation"] in linear and recipe in recipes:
                floors |= entry.get("floors", {})
    return floors


def markdown(found: dict[str, Any]) -> str:
    """The table for people: our mean ± standard deviation over seeds, the paper's number beside it."""
    everything = [*found["rows"], *found["cited"]]
    published = [c for c in found["columns"] if any(c in row["paper"] for row in everything)]
    measured = [c for c in found["columns"] if any(c in row["mean"] for row in found["rows"])]
    values = {c: [row["paper"][c] for row in everything if c in row["paper"]] for c in published}
    notes = list(dict.fromkeys(row["note"] for row in everything if row["note"]))
    precision = {
        c: max(len(str(v).partition(".")[2]) for v in values[c]) for c in published
    }  # as printed there
    head = [
        "",
        *(_NAMES.get(c, c) for c in measured),
        "seeds",
        *(f"paper {_NAMES.get(c, c)}" for c in published),
    ]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in everything:
        label = row["label"] + (_mark(notes.index(row["note"])) if row["note"] else "")
        theirs = [_cell(precision[c], row["paper"].get(c), None) for c in published]
        if "mean" in row:
            cells = [_cell(_DIGITS.get(c, 2), row["mean"].get(c), row["std"].get(c)) for c in measured]
            lines.append([label, *cells, str(len(row["seeds"])), *theirs])
        else:
            lines.append([label, *[""] * len(measured), "cited", *theirs])
    for name, top1 in found["floors"].items():
        cells = [_cell(2, top1, None) if c == "top-1" else "" for c in measured]
        lines.append([f"*{name}*", *cells, *[""] * (len(head) - 1 - len(cells))])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    below = "".join(f"\n{_mark(i)} {note}\n" for i, note in enumerate(notes))
    scale = ", ".join([found["scale"], _length(found), *_variant(found)])
    head_line = f"## {found['title']}\n\n{found['question']} Scale: {scale}."
    return f"{head_line}\n\n{text}\n{below}{verdict_table(found['verdicts'])}"


def verdict_table(verdicts: list[dict[str, Any]]) -> str:
    """The claims that something is known of: effects in points with their 95% intervals, seed by seed."""
    lines = [
        ["claim", "paper", "linear", "verdict", "kNN", "verdict", "seeds", "visible"],
        ["---", "---:", "---:", "---", "---:", "---", "---:", "---:"],
    ]
    for verdict in verdicts:
        known = [verdict.get(column) for column in ("top-1", "kNN")]
        if not any(known):
            continue
        cells = [verdict["words"], "–" if verdict["paper"] is None else f"{verdict['paper']:+.1f}"]
        for v in known:
            spread = "" if v is None or v["interval"] is None else f" ± {v['interval']:.1f}"
            cells += ["–", "–"] if v is None else [f"{v['effect']:+.1f}{spread}", v["word"]]
        seeds = ["–" if v is None else str(v["seeds"]) for v in known]
        visible = ["–" if v is None or v["visible"] is None else f"{v['visible']:.1f}" for v in known]
        cells += [" / ".join(dict.fromkeys(seeds)), " / ".join(visible)]
        lines.append(cells)
    if len(lines) == 2:
        return ""
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"\n{text}\n\nEffects are points of top-1: the mean over seeds with its 95% interval. *Visible* is the "
        "smallest effect, linear and by kNN, that this number of seeds finds four times in five.\n"
    )


def _mark(place: int) -> str:
    """The mark of the footnote at `place`: ¹, ², ³."""
    return str(place + 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _variant(found: dict[str, Any]) -> list[str]:
    """How its runs differ from the scale's own."""
    return [word.replace("-", " ") for word in found.get("variant", ())]


def _length(found: dict[str, Any]) -> str:
    return ", ".join(map(duration, found["epochs"]))


def _cell(digits: int, value: float | None, spread: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def plot(found: dict[str, Any], path: Path) -> bool:
    """A picture of the headline column, beside the paper's if it has one; False without matplotlib or numbers."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    column = found["columns"][0]
    rows = [r for r in found["rows"] if column in r["mean"]]
    if not rows:
        return False
    rows.reverse()  # the first row is on top
    figure = Figure(figsize=(9, 1.4 + 0.42 * len(rows)), layout="constrained")
    published = any(column in r["paper"] for r in rows)
    ours, *theirs = figure.subplots(1, 1 + published, sharey=True, squeeze=False)[0]
    places = range(len(rows))
    ours.errorbar(
        [r["mean"][column] for r in rows],
        places,
        xerr=[r["std"].get(column, 0.0) for r in rows],
        fmt="o",
        capsize=4,
        color="#0b6e99",
    )
    for r, y in zip(rows, places, strict=True):
        ours.plot([s["numbers"][column] for s in r["seeds"]], [y] * len(r["seeds"]), "|", color="#0b6e99")
        for axes in theirs:
            if column in r["paper"]:
                axes.plot([r["paper"][column]], [y], "D", color="#b5560f")
    if found["floors"] and column == "top-1":  # the one that is harder to beat
        name, value = max(found["floors"].items(), key=lambda floor: floor[1])
        ours.axvline(value, linestyle="--", color="#777777", label=name)
        figure.legend(loc="outside lower left", fontsize="small", frameon=False)
    ours.set_yticks(list(places), [r["label"] for r in rows])
    spread = ", mean ± std over seeds" * any(column in r["std"] for r in rows)
    ours.set(title=f"here ({found['scale']}, {_length(found)})", xlabel=_NAMES.get(column, column) + spread)
    for axes in theirs:
        axes.set(title="paper", xlabel=_NAMES.get(column, column))
    for axes in (ours, *theirs):
        axes.grid(axis="x", alpha=0.3)
        axes.margins(y=0.08)
    figure.suptitle(found["title"])
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
    return True
