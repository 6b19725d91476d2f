"""One long run on CIFAR-10 as image files, and others beside it: the recipe `cifar10-cpu` for hours instead of minutes.

    python benchmarks/long.py run --data CIFAR --row recipe --out long        # on one core
    python benchmarks/long.py run --data CIFAR --row local-local --out long   # on another, at the same time
    python benchmarks/long.py read --out long                                 # writes docs/results/long.json
    python benchmarks/verdicts.py                                             # draws it

The same command resumes a run, however often it is killed. An epoch has 781 steps, of some 0.2 seconds of one core
each: the 200 epochs of the default take about nine hours. kNN is measured some 20 times along the way, with 10,000
neighbors; at the end with all of them, and by a linear classifier next to its floors. `wide` is what learned the
most in half an hour: SimCLR with 32 to 256 channels. `local-local` has BN in both networks and 4 samples per device,
and `local-momentum` is to be compared with it; the recipe itself has one device. The longer the run, the smaller its
weight decay, by the rule of the recipes.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from momentum2.recipes import find
from momentum2.runs.metrics import floors_in, read_metrics
from momentum2.runs.names import METRICS, RESULTS
from momentum2.runs.results import read_results
from momentum2.settings import config_from_file
from momentum2.training.checks import number_of_views

RECIPE = find("cifar10-cpu").config
DEVICES = RECIPE.train.batch_size // 4  # of 4 samples
ROWS: dict[str, dict[str, object]] = {
    "recipe": {},
    "simclr": {"method.name": "simclr"},
    "wide": {"method.name": "simclr", "model.width": 0.5},
    "local-momentum": {"train.devices": DEVICES, "method.teacher_norm": "momentum"},
    "local-local": {"train.devices": DEVICES, "method.teacher_norm": "local"},
}
LABELS = {
    "recipe": "the recipe",
    "simclr": "SimCLR",
    "wide": "SimCLR, 32 to 256 channels",
    "local-momentum": "4 samples per device, a Momentum BN teacher",
    "local-local": "4 samples per device, BN in both networks",
}
NEIGHBORS = 10_000  # along the way
DOCS = Path(__file__).parents[1] / "docs"


def commands(options: argparse.Namespace) -> list[list[str]]:
    """The words after `momentum2`: training, then its evaluations."""
    run = str(Path(options.out) / options.row)
    settings = {
        "data.root": options.data,
        "eval_data.root": options.data,
        **ROWS[options.row],
        "train.epochs": options.epochs,
        "train.seed": options.seed,
        "train.threads": 1,
        "train.device": "cpu",
        "train.precision": options.precision,
        "optim.weight_decay": round(RECIPE.optim.weight_decay * RECIPE.train.epochs / options.epochs, 6),
        "monitor.knn_every": max(1, options.epochs // 20),
        "monitor.knn_images": NEIGHBORS,
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [
        ["pretrain", "cifar10-cpu", *flags, "--out", run],
        ["evaluate", "linear", run, "--protocol", "cached", "--threads", "1"],
    ]


def start(options: argparse.Namespace) -> int:
    """Train, or resume; then evaluate. Ends with the code of a command that fails or is stopped."""
    for words in commands(options):
        code = subprocess.run([sys.executable, "-m", "momentum2", *words]).returncode
        if code:
            return code
    return 0


def read_row(run: Path, label: str) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """kNN against CPU seconds of training; at the end also that with all neighbors, and the linear accuracy. Then
    the floors by what they were measured with."""
    config = config_from_file(run / "config.yaml")
    train = config.train
    curve, last, seconds, before = [], None, 0.0, 0
    floors: dict[str, dict[str, float]] = {}

    def note(measure: str, found: Mapping[str, float]) -> None:
        for name, top1 in found.items():
            floors.setdefault(name, {})[measure] = top1

    for record in read_metrics(run / METRICS):
        if "cpu_time" in record:
            seconds += record["cpu_time"] * (record["step"] - before)
            before = record["step"]
        if "knn_top1" in record:
            if record["knn_images"] == NEIGHBORS:
                curve.append([round(seconds, 1), record["knn_top1"]])
            else:  # the last of a finished run
                last = record["knn_top1"]
            note("curve" if record["knn_images"] == NEIGHBORS else "knn", floors_in(record))
    linear = [e for e in read_results(run / RESULTS).values() if e["evaluation"] == "linear cached"]
    for entry in linear:
        note("linear", entry["floors"])
    row = {
        "label": label,
        "views": number_of_views(config),
        "images": train.batch_size,
        "epochs": train.epochs,
        "seed": train.seed,
        "precision": train.precision,
        "cpu_seconds": round(seconds, 1),
        "curve": curve,
        "knn": last,
        "linear": linear[0]["accuracy"]["top1"] if linear else None,
    }
    return row, floors


def read(out: Path) -> dict[str, Any]:
    """What is known of all rows, as long.json has it."""
    there = [row for row in ROWS if (out / row / METRICS).exists()]
    if not there:
        sys.exit(f"There is no run in {out} yet.")
    found = [read_row(out / row, LABELS[row]) for row in there]
    return {"floors": found[0][1], "rows": [row for row, _ in found]}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "read"))
    parser.add_argument("--data", help="a folder of labeled images")
    parser.add_argument("--row", choices=tuple(ROWS), default="recipe")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 if the CPU has it"
    )
    parser.add_argument("--out", default="long")
    parser.add_argument(
        "--page", default=str(DOCS / "results" / "long.json"), help="the JSON file that read writes"
    )
    options = parser.parse_args(words)
    if options.what == "run":
        return start(options)
    text = json.dumps(read(Path(options.out)), indent=1, ensure_ascii=False) + "\n"
    Path(options.page).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
