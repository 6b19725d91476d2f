"""The results of a table's runs: read from their directories, written as JSON, Markdown and a plot."""

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch

from momentum2 import __version__
from momentum2.errors import UserError
from momentum2.files import read_json, whole_file
from momentum2.reproduce.rows import Evaluation, Row, Table, duration
from momentum2.reproduce.verdicts import OWN_SPREAD, Claim, judge, pooled
from momentum2.runs.metrics import read_metrics
from momentum2.runs.names import METRICS, RESULTS
from momentum2.runs.results import read_results

_DIGITS = {"seconds": 3}
_NAMES = {
    "top-1": "top-1 %",
    "top-5": "top-5 %",
    "recalibrated": "recalibrated, top-1 %",
    "kNN": "kNN %",
    "seconds": "s/iter",
}
#: The columns that verdicts are about.
ACCURACIES = ("top-1", "recalibrated", "kNN")


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
    found = [_accuracy(evaluation, run, seed) for evaluation in row.evaluations]
    accuracies = [accuracy for accuracy in found if accuracy is not None]
    if len(accuracies) < len(found):
        return None
    first, *others = accuracies
    top5 = first.get("top5")  # none where there are five classes or fewer
    numbers = (
        {"top-1": float(first["top1"])} | ({} if top5 is None else {"top-5": float(top5)}) | _watched(run)
    )
    more = {column: float(a["top1"]) for column, a in zip(row.also, others, strict=True)}
    return Outcome(numbers | more, run / RESULTS)


def is_evaluated(row: Row, evaluation: Evaluation, out: Path, seed: int) -> bool:
    """Whether an evaluation of a row has been made with a seed."""
    if evaluation.detects:
        return (row.detector(out, seed) / RESULTS).exists()
    return _accuracy(evaluation, row.pretraining.run(out, seed), seed) is not None


def _accuracy(evaluation: Evaluation, run: Path, seed: int) -> dict[str, Any] | None:
    """What an evaluation of a run found, or None if it has not been made."""
    for entry in read_results(run / RESULTS).values():
        made = (entry["evaluation"], entry["network"], entry.get("settings", {}).get("seed"))
        if made == (evaluation.result, evaluation.subject, seed):
            return dict(entry["accuracy"])
    return None


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
    table: Table, out: Path, seconds: dict[str, list[float]] | None, commands: Callable[[Row, int], list[str]]
) -> dict[str, Any]:
    """All that is known so far, as it is written to TABLE.json.

    Args:
        table: The table.
        out: Where its runs are.
        seconds: Seconds per iteration, turn by turn, by the name of the pretraining; None for those of the runs.
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
        turns = (seconds or {}).get(row.pretraining.name, [])
        if seconds is not None and "seconds" in columns:
            columns["seconds"] = [median(turns)] if turns else []
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
                "turns": [float(f"{turn:.4g}") for turn in turns],
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
        "verdicts": verdicts_of(table.claims, rows),
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


def verdicts_of(claims: Sequence[Claim], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is known of each claim: the paper's effect, and a verdict by each accuracy that both rows have.

    Args:
        claims: The claims.
        rows: All rows of their table, as TABLE.json has them.
    """
    by_key = {row["row"]: row for row in rows}
    values = {
        column: [
            {s["seed"]: s["numbers"][column] for s in row["seeds"] if column in s["numbers"]} for row in rows
        ]
        for column in ACCURACIES
    }
    spreads = {column: pooled(each) for column, each in values.items()}
    found = []
    for claim in claims:
        better, other = by_key[claim.better], by_key[claim.other]
        first, second = ({s["seed"]: s["numbers"] for s in row["seeds"]} for row in (better, other))
        if claim.cost:
            found.append(_cost(claim, better, other))
            continue
        entry: dict[str, Any] = {**asdict(claim), "paper": _effect(better["paper"], other["paper"])}
        for column in ACCURACIES:
            pairs = [
                first[seed][column] - second[seed][column]
                for seed in sorted(first.keys() & second.keys())
                if column in first[seed] and column in second[seed]
            ]
            if pairs:
                entry[column] = asdict(judge(pairs, claim.margin, spreads[column]))
        found.append(entry)
    return found


def _cost(claim: Claim, better: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What is known of a claim about time: the share of a step that is saved, in percent, turn by turn."""

    def saved(first: float, second: float) -> float:
        return 100 * (1 - first / second)

    times = better["paper"].get("seconds"), other["paper"].get("seconds")
    entry = {**asdict(claim), "paper": round(saved(*times), 2) if None not in times else None}
    turns = [saved(*pair) for pair in zip(better["turns"], other["turns"], strict=False)]  # or one has none
    return entry | ({"seconds": asdict(judge(turns, claim.margin))} if turns else {})


def _effect(better: dict[str, float], other: dict[str, float]) -> float | None:
    known = "top-1" in better and "top-1" in other
    return round(better["top-1"] - other["top-1"], 2) if known else None


def _seeds(runs: Path) -> list[int]:
    """The seeds of which there are runs."""
    names = [path.name for path in runs.glob("seed-*") if path.is_dir()]
    return sorted(int(name.removeprefix("seed-")) for name in names if re.fullmatch(r"seed-\d+", name))


def _floors(out: Path, table: Table) -> dict[str, dict[str, float]]:
    """What needs no training, by column: it is measured with one run and holds for all on its data."""
    columns = {
        evaluation.result: column
        for row in table.rows
        for column, evaluation in {"top-1": row.evaluation, **row.also}.items()
        if evaluation.verb.startswith("evaluate") and not evaluation.recalibrate
    }
    recipes = {row.pretraining.name.split()[0] for row in table.rows}
    floors: dict[str, dict[str, float]] = {}
    for path in sorted(out.glob(f"runs/*/*/{RESULTS}")):
        recipe = path.parent.parent.name.split(",")[0]
        for entry in read_results(path).values():
            if entry["evaluation"] in columns and recipe in recipes:
                for name, top1 in entry.get("floors", {}).items():
                    floors.setdefault(name, {})[columns[entry["evaluation"]]] = top1
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
    for name, by_column in found["floors"].items():
        cells = [_cell(2, by_column[c], None) if c in by_column else "" for c in measured]
        lines.append([f"*{name}*", *cells, *[""] * (len(head) - 1 - len(cells))])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    below = "".join(f"\n{_mark(i)} {note}\n" for i, note in enumerate(notes))
    scale = ", ".join([found["scale"], _length(found), *_variant(found)])
    head_line = f"## {found['title']}\n\n{found['question']} Scale: {scale}."
    return f"{head_line}\n\n{text}\n{below}{verdict_table(found['verdicts'])}"


def verdict_table(verdicts: list[dict[str, Any]]) -> str:
    """The claims that something is known of: effects in points with their 95% intervals, seed by seed."""
    columns = [c for c in (*ACCURACIES, "seconds") if any(c in verdict for verdict in verdicts)]
    words = {"top-1": "linear", "seconds": "time saved, %"}
    head = ["claim", "paper", *(w for c in columns for w in (words.get(c, c), "verdict")), "seeds", "visible"]
    lines = [head, ["---", "---:", *["---:", "---"] * len(columns), "---:", "---:"]]
    for verdict in verdicts:
        known = [verdict.get(column) for column in columns]
        if not any(known):
            continue
        cells = [verdict["words"], "–" if verdict["paper"] is None else f"{verdict['paper']:+.1f}"]
        for v in known:
            spread = "" if v is None or v["interval"] is None else f" ± {v['interval']:.1f}"
            cells += ["–", "–"] if v is None else [f"{v['effect']:+.1f}{spread}", v["word"]]
        seeds = [str(v["seeds"]) for v in known if v is not None]
        visible = ["–" if v["visible"] is None else f"{v['visible']:.1f}" for v in known if v is not None]
        cells += [" / ".join(dict.fromkeys(seeds)), " / ".join(visible)]
        lines.append(cells)
    if len(lines) == 2:
        return ""
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        f"\n{text}\n\nEffects are points of top-1: the mean over seeds with its 95% interval; of time saved, over "
        f"turns. With fewer than {OWN_SPREAD} seeds, the interval is from the spread that all rows of the table have "
        "in common. *Visible* is the smallest effect, in the order of the columns, that so many find four times in "
        "five.\n"
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
    floors = {name: by_column[column] for name, by_column in found["floors"].items() if column in by_column}
    if floors:  # the one that is harder to beat
        name, value = max(floors.items(), key=lambda floor: floor[1])
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
