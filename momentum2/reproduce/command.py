"""The command `momentum2 reproduce`."""

import os
import shlex
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

from momentum2.arguments import make_parser, parse
from momentum2.engine.device import allowed_cores
from momentum2.errors import UserError
from momentum2.reproduce.rows import Scale, Table
from momentum2.reproduce.runner import Stopped, Work, commands, write_table
from momentum2.reproduce.runner import reproduce as run
from momentum2.reproduce.tables import TABLES

_DESCRIPTION = (
    "Run a table of the paper, its rows with each seed, and print it beside the paper's numbers. What is finished is "
    "not run again: the same command goes on after any interruption. smoke takes minutes on the embedded shapes and "
    "shows that everything works; cifar is the same comparison on CIFAR-10 (image files in train/ and test/), for two "
    "CPU cores and a night: some 40 minutes for a row with a seed; paper has the published settings."
)


def reproduce(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser("reproduce", _DESCRIPTION)
    parser.usage = "momentum2 reproduce TABLE [--scale smoke|cifar|paper] [options]"
    parser.epilog = f"Tables: {', '.join(TABLES)}."
    add = parser.add_argument
    scale: object = Scale
    add("--scale", type=scale, default="smoke", help=f"How large: {', '.join(get_args(Scale))}.")
    add("--rows", type=str | None, default=None, help="Only these rows, by their names with commas between.")
    add("--seeds", type=str | None, default=None, help="Seeds with commas between (default: 0; cifar: 0,1).")
    add(
        "--epochs",
        type=int | None,
        default=None,
        help="Length of the shortest pretraining instead of the scale's own.",
    )
    add("--out", type=str | None, default=None, help="Where all goes (default: runs/reproduce/SCALE).")
    add("--data", type=str | None, default=None, help="The images to pretrain on; smoke needs none.")
    add("--detection-data", type=str | None, default=None, help="COCO or LVIS, for the tables about them.")
    add("--jobs", type=int | None, default=None, help="Runs side by side (default: one a core; paper: 1).")
    add(
        "--launcher",
        type=str | None,
        default=None,
        help="What starts `-m momentum2 ...`, with {nodes} for the number of machines of 8 GPUs (paper: torchrun).",
    )
    add("--dry-run", action="store_true", help="Print the commands instead of running them.")
    if arguments and arguments[0] in ("-h", "--help"):
        parse(parser, arguments)
    if not arguments or arguments[0].startswith("-"):
        raise UserError(f"Say which table: momentum2 reproduce TABLE, one of {', '.join(TABLES)}.")
    name, options = arguments[0], parse(parser, arguments[1:])
    if name not in TABLES:
        close = get_close_matches(name, TABLES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(TABLES)}."
        raise UserError(f"There is no table called {name!r}; {hint}")
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {options.jobs}.")
    paper = options.scale == "paper"
    if paper and options.launcher is None and not options.dry_run:
        raise UserError(
            "Say how commands start on your devices, such as --launcher 'torchrun --nnodes {nodes} --nproc-per-node 8 "
            "...', or print them with --dry-run."
        )
    if options.scale == "smoke" and options.data is not None:
        raise UserError("--scale smoke draws its own images; leave --data out, or use --scale cifar.")
    try:
        shlex.split(options.launcher or "")
    except ValueError as error:
        raise UserError(f"--launcher {options.launcher}: {str(error).lower()}.") from None
    if options.epochs is not None and options.epochs < 1:
        raise UserError(f"--epochs must be at least 1, not {options.epochs}.")
    table = TABLES[name](options.scale, options.epochs)
    keys = _keys(table, options.rows)
    if not options.dry_run:
        _check_lists(table, keys)
    work = Work(
        table=replace(table, epochs=options.epochs),
        keys=keys,
        out=Path(options.out or f"runs/reproduce/{options.scale}"),
        seeds=_seeds(
            ("0,1" if options.scale == "cifar" else "0") if options.seeds is None else options.seeds
        ),
        root=_root(options.data, "--data", options.scale != "smoke", "PRETRAINING_IMAGES", options.dry_run),
        detection_root=_root(
            options.detection_data,
            "--detection-data",
            paper and any(row.evaluation.detects for row in table.rows),
            "DETECTION_IMAGES",
            options.dry_run,
        ),
        launcher=options.launcher,
        processes=0 if paper else 2,
    )
    if options.dry_run:
        print("\n".join(commands(work)))
        return 0
    try:
        text = run(work, options.jobs or (1 if paper else allowed_cores()))
    except Stopped:
        write_table(work)
        print("Stopped and saved: run the same command again to go on.")
        return os.EX_TEMPFAIL
    print(f"\n{text}\nWritten to {work.out / work.table.stem}.md, .json and .png.")
    return 0


def _keys(table: Table, wanted: str | None) -> tuple[str, ...]:
    known = tuple(row.key for row in table.rows)
    keys = known if wanted is None else tuple(dict.fromkeys(key.strip() for key in wanted.split(",")))
    cited = {row.key for row in table.cited}
    for key in keys:
        if key in cited:
            raise UserError(
                f"{key!r} is cited from the paper and cannot be run; the rows of {table.name} that can are "
                f"{', '.join(known)}."
            )
        if key not in known:
            raise UserError(f"{table.name} has no row {key!r}; its rows are {', '.join(known)}.")
    return keys


def _check_lists(table: Table, keys: tuple[str, ...]) -> None:
    """Fine-tuning comes after days of pretraining: its lists of images had better be there."""
    for row in table.rows:
        options = row.evaluation.options
        if row.key in keys and "--list" in options:
            name = options[options.index("--list") + 1]
            if not Path(name).is_file():
                raise UserError(f"There is no {name} here; put SimCLR's list of labelled images there.")


def _seeds(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--seeds takes whole numbers with commas between, such as 0,1,2, not {text!r}.")
    return tuple(dict.fromkeys(int(word) for word in words))


def _root(given: str | None, flag: str, needed: bool, placeholder: str, dry_run: bool) -> str | None:
    """Where images are; commands that are only printed may have a placeholder."""
    if not needed:
        return None
    if given is None:
        if dry_run:
            return placeholder
        raise UserError(f"Say where the images are: {flag} DIR.")
    if not dry_run and not Path(given).is_dir():
        raise UserError(f"{flag} {given} is not a folder; give the one that holds the images.")
    return str(Path(given))
