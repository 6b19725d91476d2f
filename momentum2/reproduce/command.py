"""What somebody asks for with `momentum2 reproduce`, as work that can be done."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from momentum2.config import Count
from momentum2.errors import SettingError, UserError, hint
from momentum2.machine import allowed_cores
from momentum2.recipes import find
from momentum2.reproduce.rows import Scale, Table
from momentum2.reproduce.runner import Work
from momentum2.reproduce.scales import REPULSION, base, size_flags
from momentum2.reproduce.stability import Instrument
from momentum2.reproduce.stability_page import Study
from momentum2.reproduce.tables import TABLES
from momentum2.settings import override

#: What is not a table: the noise of a teacher's targets.
STABILITY = "stability"
INSTRUMENTS: dict[Scale, Instrument] = {
    "smoke": Instrument((0.25, 1.0), (0.5, 0.1), (2, 4, 16), window=5, pool=256, reference=512, draws=3),
    "cifar": Instrument(
        shares=(0.05, 0.25, 0.5, 0.75, 1.0),
        alphas=(0.5, 0.2, 0.1, 0.05),
        samples=(2, 4, 8, 16, 32),
        window=60,
        pool=512,
        reference=2048,
        draws=6,
    ),
}


@dataclass(frozen=True)
class ReproduceOptions:
    """How a table, or stability, is run.

    Args:
        scale: Size of the runs.
        rows: Only these rows: names separated by commas.
        seeds: Seeds separated by commas (default: 0; cifar: 0,1).
        epochs: Length of the shortest pretraining (default: the scale's own).
        loss: paper, or repulsion in the batch without a predictor, which learns faster (not for scale paper).
        samples: Samples per device, in the scale's batch (default: 4; not for scale paper).
        out: Folder of the runs and tables (default: runs/reproduce/SCALE).
        data: The images to pretrain on; smoke needs none.
        detection_data: COCO or LVIS, for the tables about them.
        jobs: Runs at the same time (default: one per core; paper: 1).
        launcher: What starts `-m momentum2 ...`, with {nodes} for the number of machines of 8 GPUs (paper: torchrun).
        dry_run: Print the commands instead of running them.
    """

    scale: Scale = "smoke"
    rows: str | None = None
    seeds: str | None = None
    epochs: Count | None = None
    loss: Literal["paper", "repulsion"] = "paper"
    samples: Count | None = None
    out: str | None = None
    data: str | None = None
    detection_data: str | None = None
    jobs: Count | None = None
    launcher: str | None = None
    dry_run: bool = False


def find_work(name: str, options: ReproduceOptions) -> Work:
    """The table called `name` as it will be run, or a `UserError` before anything is."""
    if name not in TABLES:
        raise UserError(f"There is no table called {name!r}. {hint(name, (*TABLES, STABILITY))}")
    paper = options.scale == "paper"
    if paper and options.launcher is None and not options.dry_run:
        raise SettingError(
            "launcher",
            "is required at the paper's scale. Set it to what starts a command on your devices, such as "
            "'torchrun --nnodes {nodes} --nproc-per-node 8 ...', or print the commands with dry-run.",
        )
    _check_data(options)
    try:
        shlex.split(options.launcher or "")
    except ValueError as error:
        raise SettingError(
            "launcher", f"{options.launcher} is not a command ({str(error).lower()})."
        ) from None
    table = _varied(TABLES[name](options.scale, options.epochs), options)
    keys = _keys(table, options.rows)
    if not options.dry_run:
        _check_lists(table, keys)
    return Work(
        table=replace(table, epochs=options.epochs),
        keys=keys,
        out=Path(options.out or f"runs/reproduce/{options.scale}"),
        seeds=_seeds(options),
        root=_root(options.data, "data", options.scale != "smoke", "PRETRAINING_IMAGES", options.dry_run),
        detection_root=_root(
            options.detection_data,
            "detection_data",
            paper and any(row.evaluation.detects for row in table.rows),
            "DETECTION_IMAGES",
            options.dry_run,
        ),
        launcher=options.launcher,
        processes=0 if paper else 2,
    )


def find_study(options: ReproduceOptions) -> Study:
    """The stability of targets as it will be measured, or a `UserError` before anything is."""
    if options.scale == "paper":
        raise SettingError(
            "scale", f"paper is not for {STABILITY}, which trains on a CPU. Use smoke or cifar."
        )
    defaults = ReproduceOptions()
    for name in ("rows", "samples", "detection_data", "jobs", "launcher", "dry_run"):
        if getattr(options, name) != getattr(defaults, name):
            raise SettingError(name, f"does not apply to {STABILITY}. Leave it out.")
    _check_data(options)
    root = _root(options.data, "data", options.scale != "smoke", "", False)
    b = base(options.scale, "", options.epochs)
    repulsion = options.loss == "repulsion"
    run = b.pretraining(REPULSION if repulsion else {})
    other = b.epochs != base(options.scale, "").epochs
    words = [f"{b.epochs}-epochs"] * other + ["repulsion"] * repulsion
    return Study(
        scale=options.scale,
        epochs=b.epochs,
        loss=options.loss,
        instrument=INSTRUMENTS[options.scale],
        config=lambda seed: override(find(run.recipe).config, run.settings(seed, root)),
        seeds=_seeds(options),
        out=Path(options.out or f"runs/reproduce/{options.scale}"),
        stem="-".join([STABILITY, *words]),
    )


def _check_data(options: ReproduceOptions) -> None:
    if options.scale == "smoke" and options.data is not None:
        raise SettingError("data", "does not apply to scale smoke, which draws its own images. Leave it out.")


def _varied(table: Table, options: ReproduceOptions) -> Table:
    """The table with another loss, or another number of samples per device."""
    changes: dict[str, object] = {}
    words = []
    if options.scale == "paper" and (options.loss != "paper" or options.samples is not None):
        raise SettingError(
            "loss" if options.loss != "paper" else "samples", "is only for the scales smoke and cifar."
        )
    if options.loss == "repulsion":
        if others := sorted({row.pretraining.method for row in table.rows} - {"byol"}):
            raise SettingError(
                "loss", f"repulsion is only for tables of BYOL; {table.name} has {' and '.join(others)}."
            )
        changes |= REPULSION
        words.append("repulsion")
    if options.samples is not None:
        if any("train.devices" in row.pretraining.changes for row in table.rows):
            raise SettingError("samples", f"is what the rows of {table.name} differ in. Leave it out.")
        batch = base(options.scale, "").batch
        if batch % options.samples:
            raise SettingError(
                "samples", f"must divide the batch of {batch}, and {options.samples} does not."
            )
        changes |= size_flags(batch, options.samples)
        words.append(f"{options.samples}-samples")
    return table.varied(changes, tuple(words))


def jobs_of(options: ReproduceOptions) -> int:
    """Number of runs at the same time."""
    return options.jobs or (1 if options.scale == "paper" else allowed_cores())


def _keys(table: Table, wanted: str | None) -> tuple[str, ...]:
    known = tuple(row.key for row in table.rows)
    keys = (
        known
        if wanted is None
        else tuple(
            # `split` was the name of local norms in version 0.1, and so of their rows
            dict.fromkeys(key.strip().replace("split", "local") for key in wanted.split(","))
        )
    )
    cited = {row.key for row in table.cited}
    for key in keys:
        if key in cited:
            raise UserError(
                f"{key!r} is cited from the paper and cannot be run. The rows of {table.name} that can are "
                f"{', '.join(known)}."
            )
        if key not in known:
            raise UserError(f"{table.name} has no row {key!r}. Its rows are {', '.join(known)}.")
    return keys


def _check_lists(table: Table, keys: tuple[str, ...]) -> None:
    """Fine-tuning comes after days of pretraining: its lists of images must be there before."""
    for row in table.rows:
        options = row.evaluation.options
        if row.key in keys and "--list" in options:
            name = options[options.index("--list") + 1]
            if not Path(name).is_file():
                raise UserError(
                    f"There is no {name} in this folder. Put SimCLR's list of labeled images here."
                )


def _seeds(options: ReproduceOptions) -> tuple[int, ...]:
    default = "0,1" if options.scale == "cifar" else "0"
    text = default if options.seeds is None else options.seeds
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 19 for word in words):
        raise SettingError("seeds", f"takes whole numbers separated by commas, such as 0,1,2, not {text!r}.")
    return tuple(dict.fromkeys(int(word) for word in words))


def _root(given: str | None, name: str, needed: bool, placeholder: str, dry_run: bool) -> str | None:
    """Where images are; commands that are only printed may have a placeholder."""
    if not needed:
        return None
    if given is None:
        if dry_run:
            return placeholder
        raise SettingError(name, "is required. Set it to the folder of the images.")
    if not dry_run and not Path(given).is_dir():
        raise SettingError(name, f"{given} is not a folder. Pass the one that contains the images.")
    return str(Path(given))
