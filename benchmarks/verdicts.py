"""Write docs/results.md, and the plots on it, from the files in docs/results.

    python benchmarks/verdicts.py

Those files are what `momentum2 reproduce TABLE` (TABLE.json), `momentum2 reproduce stability` (stability.json) and
`benchmarks/long.py read` (long.json) write. Nothing on the page is written by hand but the words in this file.
"""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from momentum2.reproduce import TABLES, stability_page
from momentum2.reproduce.outcome import ACCURACIES, markdown, verdicts_of
from momentum2.reproduce.rows import duration
from momentum2.reproduce.verdicts import OWN_SPREAD, judge

DOCS = Path(__file__).parents[1] / "docs"
#: The tables with claims, in the order of the page.
CLAIMED = ("bn-statistics", "bn-batch-size", "alpha", "alpha-base", "moco")
NAMES = {"top-1": "linear", "recalibrated": "linear, recalibrated", "kNN": "kNN"}

TITLE = """# The paper's claims, measured

<!-- Written by `python benchmarks/verdicts.py` from the files in docs/results; do not edit. -->"""
HEAD = """
How the claims of *Momentum² Teacher* hold up on CPU cores with CIFAR-10, **after {length}; the paper's numbers are
after 200 to 1,000 on larger data**. Two rows are compared seed by seed, by a linear classifier on the teacher's
features: the effect in points with its 95% interval over seeds, and the smallest effect that this many seeds would
detect with 80% power (*visible*). *Shown*: the whole interval agrees with the claim. *Contradicted*: the whole
interval disagrees with it. *Bounded*: neither; the effect lies in the interval. *One seed*: there is no interval, so
nothing is decided. *Above* or *below the paper's*: the interval does not reach the paper's effect. The paper speaks of
its own loss: rows with repulsion, and those *not in the paper*, put its claims to another test. A verdict is weak if
the effects beside it, with recalibrated statistics and by kNN, do not support it. Rows about time are compared turn by
turn; a saving is positive. If two rows share fewer than {own} seeds, their interval is computed from the spread of all
rows of the table (of those about targets, from their own). "As good as" allows 1 point. About one 95% interval in
twenty misses the true effect. [How to run all of this](reproduce.md).
"""
WHAT_WENT = """Version 0.1's runs are gone: their devices shared one history of Momentum BN, and a fixed α began from
mean 0 and variance 1 instead of measured statistics, so they did not test the paper's method."""
ACCURACY = """CIFAR-10, {length} of 50,000 images, 128 per step, a ResNet-10 with 16 to 128 channels, Muon; the
linear classifier learns from 10,000 training images, which are also kNN's neighbors, and all 10,000 test images
count. momentum2 {momentum2}, torch {torch}, one thread. *Recalibrated*: the statistics of batch norm are measured
again before the evaluation, which separates what a norm does to the training from the statistics that it leaves
behind. In the tables below, ± is the standard deviation over seeds."""
TIME = """Seconds per step of Table 1 with the paper's loss, measured in turns on two processes (gloo) that divide the
batch, so that synced norms pay for what they send; all other work on the machine was stopped meanwhile."""
NOISE = """`momentum2 reproduce stability` measures [how steady the targets
are](reproduce.md#how-steady-the-targets-are) without any accuracy: {seeds} seeds, {length} of CIFAR-10, {batch}
images per step, {backbone} at width {width:g}, {optimizer}, 4 samples per device. In units of the signal, the
variance between images, after 5, 50 and 100% of the training (all numbers: {links}). At the end of the paper's
schedule α is 0, so that its noise is 0 by construction."""
LONG = """CIFAR-10 in the network of `cifar10-cpu`, one thread and one seed per row. kNN uses 10,000 neighbors
during training and all of them at the end. [How to run this](reproduce.md)."""


def read(folder: Path) -> list[dict[str, Any]]:
    """The tables that have been run, those with the paper's loss first; what they say is judged here."""
    tables = []
    for path in sorted(folder.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        if table.get("table") in CLAIMED and any(row["seeds"] for row in table["rows"]):
            claims = TABLES[table["table"]](table["scale"]).claims
            tables.append({**table, "stem": path.stem, "verdicts": verdicts_of(claims, table["rows"])})
    return sorted(tables, key=lambda t: (CLAIMED.index(t["table"]), "repulsion" in t["variant"], t["epochs"]))


def setting(table: dict[str, Any]) -> str:
    """How its runs differ from those of another file with the same table."""
    own = "MoCo's loss" if table["table"] == "moco" else "the paper's loss"
    words = ["repulsion" if "repulsion" in table["variant"] else own]
    if table["table"] != "bn-batch-size":  # whose rows say it themselves
        samples = next((word for word in table["variant"] if word.endswith("-samples")), "4-samples")
        words.append(samples.replace("-", " "))
    if table["epochs"] != lengths(table):
        words.append(duration(table["epochs"][0]))
    return ", ".join(words)


def lengths(table: dict[str, Any]) -> list[int]:
    """The epochs of its rows, as the scale has them."""
    return sorted({row.pretraining.epochs for row in TABLES[table["table"]](table["scale"]).rows})


def prose(text: str) -> str:
    """A paragraph, broken into lines as on the other pages."""
    return textwrap.fill(" ".join(text.split()), 150, break_long_words=False, break_on_hyphens=False)


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def effect(verdict: dict[str, Any] | None, digits: int = 1) -> str:
    """The effect with its interval."""
    if verdict is None:
        return "–"
    spread = "" if verdict["interval"] is None else f" ± {verdict['interval']:.{digits}f}"
    return f"{verdict['effect']:+.{digits}f}{spread}".replace("-", "−")


def cells(
    verdict: dict[str, Any],
    others: Sequence[dict[str, Any] | None] = (None, None),
    digits: int = 1,
    paper: float | None = None,
) -> list[str]:
    """Effect, the same by other measures, smallest visible effect, seeds and word, with what is not the paper's."""
    visible = "–" if verdict["visible"] is None else f"{verdict['visible']:.{digits}f}"
    effects = [effect(each, digits) for each in (verdict, *others)]
    word, apart = (
        f"**{verdict['word']}**",
        verdict["effect"] - (verdict["effect"] if paper is None else paper),
    )
    if verdict["interval"] is not None and abs(apart) > verdict["interval"]:
        word += f", {'above' if apart > 0 else 'below'} the paper's"
    return [*effects, visible, str(verdict["seeds"]), word]


def verdict_rows(tables: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """One row for each claim and setting; one for each claim of which nothing is known has no more than its words."""
    compared, ran = set(), set()  # the same two runs are not two results
    for name in CLAIMED:
        table = TABLES[name]("cifar")
        runs = {row.key: row.pretraining.name for row in table.rows}
        for place, claim in enumerate(table.claims):
            known: list[list[str]] = []
            for found in (t for t in tables if t["table"] == name):
                verdict = found["verdicts"][place]
                word = verdict.get("seconds" if claim.cost else "top-1")
                two = (runs[claim.better], runs[claim.other])
                same = (setting(found).split(",")[0], tuple(found["epochs"]), two, claim.margin, claim.cost)
                # The time depends on no loss.
                if word is None or same in compared or (claim.cost and known):
                    continue
                compared.add(same)
                ran.add(two)
                where = "time of a step, %; turns on two processes" if claim.cost else setting(found)
                paper = "–" if verdict["paper"] is None else f"{verdict['paper']:+.1f}".replace("-", "−")
                others = [verdict.get(column) for column in ACCURACIES[1:]]
                known.append([claim.words, where, paper, *cells(word, others, paper=verdict["paper"])])
            if known or (runs[claim.better], runs[claim.other]) not in ran:
                yield from known or [[claim.words]]


def differences(targets: dict[str, Any], share: float, part: str, a: str, b: str) -> list[float]:
    """Of norm a less norm b, in units of the signal, at 4 samples per device: one for each seed."""

    def value(seed: dict[str, Any], norm: str) -> float:
        own = next(p["samples"] for p in seed["points"] if p["norm"] == "scheduled")
        (point,) = (
            p
            for p in seed["points"]
            if (p["share"], p["norm"]) == (share, norm) and (norm == "synced" or p["samples"] == own)
        )
        parts = ("noise", "history", "bias") if part == "sum" else (part,)
        return float(sum(point[name] for name in parts) / point["signal"])

    return [value(seed, a) - value(seed, b) for seed in targets["seeds"]]


def stability_rows(targets: dict[str, Any]) -> Iterator[list[str]]:
    """Verdicts on the noise of targets, in units of the signal; at the end α is 0, where there is nothing to judge."""
    loss = {"paper": "the paper's loss"}.get(targets["settings"]["loss"], targets["settings"]["loss"])
    for words, part, b in (
        ("Targets of Momentum BN are less noisy than those of BN", "noise", "local"),
        (
            "Targets of Momentum BN have smaller errors than those of synced BN (not in the paper)",
            "sum",
            "synced",
        ),
    ):
        found = judge(differences(targets, 0.5, part, b, "scheduled"))
        yield [words, f"{part}/signal, middle of training; {loss}", "–", *cells(asdict(found), digits=2)]


def commands(table: dict[str, Any]) -> Iterator[str]:
    """What `momentum2 reproduce` was told: one command for the rows with the same seeds."""
    by_seeds: dict[str, list[str]] = {}
    for row in table["rows"]:
        if row["seeds"]:
            by_seeds.setdefault(",".join(str(seed["seed"]) for seed in row["seeds"]), []).append(row["row"])
    for seeds, keys in by_seeds.items():
        words = [f"momentum2 reproduce {table['table']} --scale {table['scale']} --data CIFAR"]
        words += [f"--rows {','.join(keys)} --seeds {seeds}"]
        words += ["--loss repulsion"] if "repulsion" in table["variant"] else []
        words += [f"--samples {word.split('-')[0]}" for word in table["variant"] if word.endswith("-samples")]
        words += [f"--epochs {table['epochs'][0]}"] if table["epochs"] != lengths(table) else []
        yield " ".join(words)


def below(tables: Sequence[dict[str, Any]]) -> str:
    """How many rows end below the floors; those of several tables count once."""
    rows: dict[str, dict[str, float]] = {}
    for table in tables:
        for row in table["rows"]:
            if row["seeds"]:
                rows.setdefault(row["seeds"][0]["results"].partition("/seed-")[0], row["mean"])
    parts = []
    for column, words in (("top-1", "the linear classifier"), ("kNN", "kNN")):
        means = [mean[column] for mean in rows.values() if column in mean]
        floors = {name: values[column] for name, values in tables[0]["floors"].items() if column in values}
        counts = []
        for name, floor in sorted(floors.items(), key=lambda item: item[1]):
            count = sum(value < floor for value in means)
            many = "none" if count == 0 else "all" if count == len(means) else f"{count}"
            counts.append(f"{many} below {name} ({floor:.1f}%)")
        if counts:
            parts.append(f"Of {len(means)} different rows, by {words}: {', '.join(counts)}.")
    return " ".join(parts)


def of_norms(targets: dict[str, Any]) -> str:
    """Noise and all errors of the norms along the training."""
    shares = (0.05, 0.5, 1.0)
    points = {
        (
            stability_page.named(p) if p["norm"] != "scheduled" else "Momentum BN, the paper's schedule",
            p["share"],
        ): p
        for p in targets["points"]
        if p["norm"] in ("synced", "ema") or p["samples"] == 4
    }
    head = ["", *(f"{part}, {share:.0%}" for part in ("noise", "all errors") for share in shares)]
    rows = []
    for name in dict.fromkeys(name for name, _ in points):
        means = [points[name, share]["mean"] for share in shares]
        values = [m[part] for part in ("noise", "sum") for m in means]
        rows.append([name, *(f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−") for value in values)])
    return grid(head, rows)


def of_long(long: dict[str, Any]) -> str:
    """Where the long runs end, and their floors."""

    def cell(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f}"

    rows = [
        [
            f"{row['label']}, {row['views']} views of {row['images']} images, {duration(row['epochs'])}, "
            f"{row['precision']}",
            f"{row['cpu_seconds'] / 3600:.2f}",
            cell(row["knn"]),
            cell(row["linear"]),
        ]
        for row in long["rows"]
    ]
    floors = [
        [f"*{name}*", "", cell(values.get("knn")), cell(values.get("linear"))]
        for name, values in long["floors"].items()
    ]
    return grid(["", "CPU hours of training", "kNN %", "linear %"], rows + floors)


def page(folder: Path) -> str:
    """docs/results.md."""
    tables, studies = read(folder), read_studies(folder)
    head = [
        "claim",
        "measured with",
        "paper",
        "effect",
        "recalibrated",
        "kNN",
        "visible",
        "seeds or turns",
        "verdict",
    ]
    rows = [row for targets in studies.values() for row in stability_rows(targets)] + list(
        verdict_rows(tables)
    )
    missing = [row[0] for row in rows if len(row) == 1]
    length = " and ".join(dict.fromkeys(duration(epochs) for table in tables for epochs in table["epochs"]))
    parts = [
        TITLE,
        prose(HEAD.format(length=length, own=OWN_SPREAD)),
        grid(head, [row for row in rows if len(row) > 1], 2),
    ]
    parts += [f"Not run: {'; '.join(missing)}."] if missing else []
    if tables:
        first = tables[0]
        lines = [line for table in tables for line in commands(table)]
        parts += [
            "## Accuracy",
            prose(
                ACCURACY.format(length=length, **first["environment"]) + " " + below(tables) + " " + WHAT_WENT
            ),
            "```text\n" + "\n".join(lines) + "\n```",
        ]
        for table in tables:
            # The claims stand above, and the floors are the same for all.
            floors = first["floors"] if table is first else {}
            known = [row for row in table["rows"] if row["seeds"]]
            # Only the first table was timed with nothing else running.
            columns = [column for column in table["columns"] if column != "seconds" or table is first]
            shown = {
                **table,
                "rows": known,
                "columns": columns,
                "cited": [],
                "verdicts": [],
                "floors": floors,
            }
            title, _, rest = markdown(shown).partition("\n\n")
            _, _, body = rest.partition("\n\n")
            picture = f"![Effects with their intervals, and the accuracies](results/{table['stem']}.svg)"
            parts.append(f"#{title}, {setting(table)}\n\n{body.strip()}\n\n{picture}")
    if any(row["turns"] for table in tables for row in table["rows"]):
        parts += ["## Time", prose(TIME), "![Seconds per step](results/cost.svg)"]
    run = next(iter(studies.values()))["settings"]
    model = run["training"]["model"]
    parts += [
        "## Noise of the targets",
        prose(
            NOISE.format(
                seeds=len(next(iter(studies.values()))["seeds"]),
                length=duration(run["epochs"]),
                batch=run["training"]["train"]["batch_size"],
                backbone=model["backbone"],
                width=model["width"],
                optimizer=run["training"]["optim"]["name"],
                links=", ".join(
                    f"[{targets['settings']['loss']} loss](results/stability/{stem}.md)"
                    for stem, targets in studies.items()
                ),
            )
        ),
    ]
    for targets in studies.values():
        parts += [f"With the {targets['settings']['loss']} loss:"] * (len(studies) > 1) + [of_norms(targets)]
    parts += [
        "![Errors of a target against α](results/stability/stability-alpha.svg)",
        "![Errors of a target against samples per device](results/stability/stability-samples.svg)",
    ]
    if (folder / "long.json").exists():
        long = json.loads((folder / "long.json").read_text(encoding="utf-8"))
        parts += ["## One long run", prose(LONG), of_long(long), "![kNN against CPU hours](results/long.svg)"]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def read_studies(folder: Path) -> dict[str, dict[str, Any]]:
    """What the instrument measured, by the name of its file: the paper's loss first."""
    paths = sorted((folder / "stability").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def plot_verdicts(table: dict[str, Any], path: Path) -> None:
    """Left: what every seed of every row reached. Right: the claims' effects with their intervals."""
    from matplotlib.figure import Figure

    rows = [row for row in table["rows"] if row["seeds"]][::-1]
    known = [v for v in table["verdicts"] if any(column in v for column in ACCURACIES)][::-1]
    height = 1.5 + 0.36 * max(len(rows), len(known))
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, column in enumerate(ACCURACIES):
        shift = 0.22 * (1 - place)
        for y, row in enumerate(rows):
            values = [seed["numbers"][column] for seed in row["seeds"]]
            left.plot(values, [y + shift] * len(values), "o", ms=3.5, alpha=0.7, color=f"C{place}")
        for y, verdict in enumerate(known):
            if column not in verdict:
                continue
            half = verdict[column]["interval"]
            right.errorbar(
                [verdict[column]["effect"]],
                [y + shift],
                xerr=half,
                fmt="o",
                mfc=f"C{place}" if half is not None else "none",  # one seed has no interval
                ms=4,
                capsize=3,
                color=f"C{place}",
                label=NAMES[column],
            )
    left.set_yticks(range(len(rows)), [row["label"] for row in rows])
    for name, floors in table["floors"].items():
        if "top-1" in floors:
            left.axvline(floors["top-1"], ls=":", color="#777777", lw=1)
            left.annotate(name, (floors["top-1"], 1), (2, 2), xycoords=("data", "axes fraction"), fontsize=7,
                          textcoords="offset points", rotation=20)  # fmt: skip
    left.set(xlabel="top-1, %, every seed", ylim=(-0.6, len(rows) - 0.4))
    right.set_yticks(range(len(known)), [v["words"] for v in known], fontsize=8)
    for y, verdict in enumerate(known):
        if verdict["paper"] is not None:
            right.plot([verdict["paper"]], [y], "D", ms=5, mfc="none", color="#555555", label="paper")
    right.axvline(0, color="black", lw=0.8)
    right.set(xlabel="effect, points, with its 95% interval", ylim=(-0.6, len(known) - 0.4))
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    handles, labels = right.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once, loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def plot_cost(table: dict[str, Any], path: Path) -> None:
    """Every turn of every row, and its median."""
    from matplotlib.figure import Figure

    rows = [row for row in table["rows"] if row["turns"]][::-1]
    figure = Figure(figsize=(8, 0.8 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        axes.plot(row["turns"], [y] * len(row["turns"]), "|", color="C0", alpha=0.6)
        axes.plot([median(row["turns"])], [y], "o", color="C0")
    axes.set_yticks(range(len(rows)), [row["label"] for row in rows])
    axes.set(xlabel="seconds per step: turns and their median", xlim=(0, None), ylim=(-0.6, len(rows) - 0.4))
    axes.grid(axis="x", alpha=0.3)
    save(figure, path)


def plot_long(long: dict[str, Any], path: Path) -> None:
    """kNN against hours of training; kNN with all neighbors and the linear accuracy at the end, and the floors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(long["rows"]):
        hours = [seconds / 3600 for seconds, _ in row["curve"]]
        axes.plot(
            hours,
            [knn for _, knn in row["curve"]],
            "o-",
            ms=3,
            color=f"C{number}",
            label=f"{row['label']}, kNN with 10,000 neighbors",
        )
        for name, marker in (("knn", "s"), ("linear", "D")):
            if row[name] is not None:
                words = {"knn": "kNN, all neighbors", "linear": "linear"}[name]
                end = row["cpu_seconds"] / 3600
                axes.plot([end], [row[name]], marker, color=f"C{number}", label=f"{row['label']}, {words}")
    for name, values in long["floors"].items():
        for measure, value in values.items():
            words = {"knn": "kNN, all neighbors", "curve": "kNN with 10,000 neighbors"}.get(measure, measure)
            axes.axhline(value, ls=":", color="#777777", lw=1)
            axes.annotate(
                f"{name}, {words}",
                (1, value),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
                fontsize=6,
            )
    axes.set(xlabel="CPU hours of training", ylabel="top-1, %")
    axes.legend(fontsize=7, frameon=False)
    axes.grid(alpha=0.3)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """As an SVG that is the same for the same numbers, with its text as text."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "momentum2"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    folder = DOCS / "results"
    tables = read(folder)
    (DOCS / "results.md").write_text(page(folder), encoding="utf-8")
    for stem, found in read_studies(folder).items():
        place = folder / "stability" / stem
        place.with_suffix(".md").write_text(stability_page.markdown(found), encoding="utf-8")
        if stem == "stability":
            stability_page.plot(found, place)
    for table in tables:
        plot_verdicts(table, folder / f"{table['stem']}.svg")
    timed = [table for table in tables if any(row["turns"] for row in table["rows"])]
    if timed:
        plot_cost(timed[0], folder / "cost.svg")
    if (folder / "long.json").exists():
        plot_long(json.loads((folder / "long.json").read_text(encoding="utf-8")), folder / "long.svg")


if __name__ == "__main__":
    main()
