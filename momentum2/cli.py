"""The command line: a command is a function of its arguments. Expected mistakes are one sentence and exit code 2."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table

from momentum2 import __version__
from momentum2.arguments import add_config, add_options, make_parser, parse, read_config
from momentum2.config import Config, DataConfig, Network, Resume
from momentum2.data import open_dataset
from momentum2.distributed import world_size
from momentum2.errors import ProcessLost, SaidElsewhere, UserError
from momentum2.recipes import RECIPES, find, find_data, typical_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from momentum2.evaluate.subject import SubjectOptions

D = TypeVar("D", bound="DataclassInstance")
E = TypeVar("E", bound="DataclassInstance")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
    except Exception:
        if world_size() == 1:
            raise
        traceback.print_exc()
        code = 1
    if world_size() > 1:  # an error, and what python does at its end would wait for the other processes
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except SaidElsewhere:
        return 2
    except UserError as error:
        print(f"momentum2: {error}", file=sys.stderr)
        return 2
    except ProcessLost as error:  # nobody's mistake: torchrun may restart us
        print(f"momentum2: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while there was nothing to save yet
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print("momentum2: The disk is full; make room and run the same command again.", file=sys.stderr)
        return 2


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _print_help()
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("--version", "version"):
        print(f"momentum2 {__version__}")
        return 0
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(COMMANDS)}."
        raise UserError(f"There is no command called {name!r}; {hint}")
    return COMMANDS[name][0](rest)


def _print_help() -> None:
    print("usage: momentum2 COMMAND ...\n\nPretrain vision backbones without labels.\n\ncommands:")
    for name, (_, summary) in COMMANDS.items():
        print(f"  {name:<11} {summary}")
    print("\nmomentum2 COMMAND --help shows every option of a command; momentum2 --version the version.")


def recipes(arguments: list[str]) -> int:
    """List the recipes, or show one."""
    parser = make_parser("recipes", "List the named recipes with their headline numbers, or show one whole.")
    parser.usage = "momentum2 recipes [RECIPE]"
    if arguments and not arguments[0].startswith("-"):
        parse(parser, arguments[1:])
        recipe = find(arguments[0])
        print(f"{recipe.summary}\n\n  {recipe.command}\n\nexpect: {recipe.expect}\n")
        print(yaml.safe_dump(asdict(recipe.config), sort_keys=False), end="")
        return 0
    parse(parser, arguments)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recipe", "what it is", "expect"):
        table.add_column(column)
    for name, build in RECIPES.items():
        recipe = build()
        table.add_row(name, recipe.summary, recipe.expect)
    Console().print(table)
    return 0


def plan(arguments: list[str]) -> int:
    """Show what a recipe comes to."""
    parser = make_parser(
        "plan", "Resolve a recipe: steps, learning rate, momenta, BN batch, memory; trains nothing."
    )
    parser.add_argument("--processes", type=int, default=1, help="Number of processes to plan for.")
    parser.add_argument(
        "--images", type=int | None, default=None, help="Number of images, instead of opening the data."
    )
    parser.add_argument(
        "--probe", type=bool, default=False, help="Time a few steps to estimate the duration."
    )
    config, options = _parse_recipe(parser, arguments)
    for name, value in (("processes", options.processes), ("images", options.images)):
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    from momentum2.engine.estimate import planned

    for name, value in planned(config, options.images, options.processes, options.probe):
        print(f"{name:<12}{value}")
    return 0


def pretrain(arguments: list[str]) -> int:
    """Train."""
    parser = make_parser("pretrain", "Pretrain into a run directory; the same command resumes it.")
    _add_run_options(parser)
    config, options = _parse_recipe(parser, arguments)
    from momentum2.engine.pretrain import pretrain as run
    from momentum2.evaluate.online import online_knn
    from momentum2.report.page import write_last_report

    out = _out(options)
    finished = run(config, out, options.resume, online_knn)
    if not finished:
        return _stopped()
    _say(f"Done: the encoder is {out / 'encoder.safetensors'}")
    if config.monitor.report and os.environ.get("RANK", "0") == "0":
        _say(write_last_report(out))
    return 0


def views(arguments: list[str]) -> int:
    """Draw a contact sheet."""
    parser = make_parser(
        "views", "Write a picture of some images and, beside each, the views that the network sees."
    )
    parser.usage = "momentum2 views DATA --out views.png [options]"
    parser.add_argument("--out", type=str, default="views.png", help="The picture to write.")
    parser.add_argument("--count", type=int, default=8, help="Number of images.")
    source, rest = _subject("views", "DATA (a folder, archive, list or shapes)", arguments)
    data = DataConfig(image_size=32) if source == "shapes" else DataConfig()
    if source:
        data = find_data(source, data)
        data = replace(data, image_size=typical_size(open_dataset(replace(data, cache="off"))))
    add_config(parser, Config(data=data))
    options = parse(parser, rest)
    from momentum2.data.contact_sheet import write_views

    write_views(read_config(parser, options), Path(options.out), options.count)
    print(f"Wrote {options.out}")
    return 0


def evaluate(arguments: list[str]) -> int:
    """Measure an encoder."""
    kinds = ("knn", "linear", "semi")
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"usage: momentum2 evaluate {'|'.join(kinds)} RUN [options]; each has a --help of its own.")
        return 0
    if not arguments or arguments[0] not in kinds:
        raise UserError(f"Say how to evaluate: momentum2 evaluate {'|'.join(kinds)} RUN.")
    from momentum2.evaluate.knn import KnnOptions, evaluate_knn
    from momentum2.evaluate.linear import LinearOptions, evaluate_linear
    from momentum2.evaluate.results import Result, report
    from momentum2.evaluate.semi import SemiOptions, evaluate_semi
    from momentum2.evaluate.subject import Subject, open_subject

    kind, rest = arguments[0], arguments[1:]
    run: Callable[[Subject], Result | None]
    if kind == "knn":
        description = "Classify test images by their nearest training images."
        source, subject_options, knn = _subject_options("evaluate knn", description, rest, KnnOptions)
        run = lambda subject: evaluate_knn(subject, knn)  # noqa: E731
    elif kind == "linear":
        description = "Train a linear classifier on the frozen encoder."
        source, subject_options, linear = _subject_options(
            "evaluate linear", description, rest, LinearOptions
        )
        run = lambda subject: evaluate_linear(subject, linear)  # noqa: E731
    else:
        description = "Fine-tune the whole network on some of the labels."
        source, subject_options, semi = _subject_options("evaluate semi", description, rest, SemiOptions)
        run = lambda subject: evaluate_semi(subject, semi)  # noqa: E731
    with open_subject(source, subject_options) as subject:
        result = run(subject)
        if result is not None:
            report(result, subject.directory)
    return 0 if result is not None else _stopped()


def detect(arguments: list[str]) -> int:
    """Fine-tune a detector."""
    try:
        from momentum2.evaluate.detection.run import detect as run
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("faster_coco_eval"):
            raise
        raise UserError("momentum2 detect needs its extra: pip install 'momentum2[detection]'.") from None
    return run(arguments)


def embed(arguments: list[str]) -> int:
    """Write features to a file."""
    from momentum2.evaluate.embed import EmbedOptions
    from momentum2.evaluate.embed import embed as run
    from momentum2.evaluate.subject import open_subject

    description = "Write the features of images, with their names and labels, to a file."
    source, subject_options, options = _subject_options("embed", description, arguments, EmbedOptions)
    with open_subject(source, subject_options) as subject:
        count = run(subject, options)
    print(f"Wrote the features of {count:,} images to {options.out}")
    return 0


def export(arguments: list[str]) -> int:
    """Write weights for other tools."""
    from momentum2.export import FORMATS
    from momentum2.export import export as run

    parser = make_parser(
        "export", "Write an encoder for another tool, with a model card and the lines that load it."
    )
    parser.usage = "momentum2 export RUN --format FORMAT --out FOLDER [options]"
    parser.add_argument("--format", type=str | None, default=None, help=f"One of {', '.join(FORMATS)}.")
    parser.add_argument(
        "--out", type=str | None, default=None, help="The folder to write; it must not exist yet."
    )
    network: object = Network | None
    parser.add_argument(
        "--network", type=network, default=None, help="teacher or student (default: by method.export)."
    )
    parser.add_argument(
        "--recalibrate",
        type=str | None,
        default=None,
        help="Images to measure the batch-norm statistics on anew.",
    )
    parser.add_argument(
        "--licence", type=str, default="unknown", help="Licence of the weights, for the model card."
    )
    source, rest = _subject("export", "RUN", arguments)
    options = parse(parser, rest)
    if options.format is None:
        raise UserError(f"Say for which tool: --format {'|'.join(FORMATS)}.")
    lines = run(
        source, options.format, _out(options, "FOLDER"), options.network, options.recalibrate, options.licence
    )
    print(f"Wrote {options.out}. To load it:\n\n{lines}")
    return 0


def reproduce(arguments: list[str]) -> int:
    """Run a table of the paper."""
    from momentum2.reproduce.command import reproduce as run

    return run(arguments)


def report(arguments: list[str]) -> int:
    """Write the HTML page."""
    from momentum2.report.learned import ReportOptions
    from momentum2.report.page import write_report

    runs = list(takewhile(lambda a: not a.startswith("-"), arguments))
    parser = make_parser("report", "Write one self-contained HTML page about a run, or several side by side.")
    parser.usage = "momentum2 report RUN [RUN ...] [options]"
    parser.add_argument(
        "--out", type=str | None, default=None, help="The page (default: report.html in the run)."
    )
    add_options(parser, ReportOptions)
    values = parser.instantiate(parse(parser, arguments[len(runs) :]))
    options = ReportOptions(**{f.name: values[f.name] for f in fields(ReportOptions)})
    if not runs:
        raise UserError("Say which run: momentum2 report RUN [RUN ...].")
    print(f"Wrote {write_report([Path(r) for r in runs], Path(values.out) if values.out else None, options)}")
    return 0


def watch(arguments: list[str]) -> int:
    """Serve the live page."""
    from momentum2.report.watch import watch as run

    parser = make_parser("watch", "Show a run's page on this machine while it trains; ctrl-C ends it.")
    parser.usage = "momentum2 watch RUN [--port 8010]"
    parser.add_argument("--port", type=int, default=8010, help="Port on 127.0.0.1.")
    source, rest = _subject("watch", "RUN", arguments)
    run(Path(source), parse(parser, rest).port)
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "recipes": (recipes, "list the named recipes with their headline numbers"),
    "plan": (plan, "resolved settings of a recipe, memory and time; trains nothing"),
    "views": (views, "a picture of what the network sees"),
    "pretrain": (pretrain, "pretrain into a run directory, or resume it"),
    "evaluate": (evaluate, "kNN, linear or semi-supervised accuracy of a run or weights file"),
    "detect": (detect, "fine-tune a detector on an encoder, or use one; COCO and LVIS metrics"),
    "embed": (embed, "features of images, with their names, as a file"),
    "report": (report, "one HTML page about a run, or several side by side"),
    "watch": (watch, "that page, live, while a run trains"),
    "reproduce": (reproduce, "a table of the paper, run here, beside the paper's numbers"),
    "export": (export, "weights for torchvision, timm, detectron2, ONNX or Hugging Face"),
}


def _subject(command: str, what: str, arguments: list[str]) -> tuple[str, list[str]]:
    """The first argument, which says what a command is about, and the rest; empty if only help is asked for."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    if any(a in ("-h", "--help") for a in arguments):
        return "", arguments
    raise UserError(f"Say what first: momentum2 {command} {what} [options].")


def _subject_options(
    command: str, description: str, arguments: list[str], options_class: type[D]
) -> tuple[str, "SubjectOptions", D]:
    """Parse `RUN [--data PATH] [options]` into the source, what is evaluated on what, and how."""
    from momentum2.evaluate.subject import SubjectOptions, data_of

    source, rest = _subject(command, "RUN", arguments)
    parser = make_parser(command, description)
    parser.usage = f"momentum2 {command} RUN [--data PATH] [options]"
    add_options(parser, SubjectOptions)
    add_options(parser, options_class)
    data = data_of(source) if source else DataConfig(name="none")
    rest = [word for a in rest for word in (a.split("=", 1) if a.startswith("--data=") else [a])]
    if "--data" in rest[:-1]:
        at = rest.index("--data")
        data = find_data(rest[at + 1], data)
        rest = rest[:at] + rest[at + 2 :]
    parser.set_defaults({"data": asdict(data)})
    values = parser.instantiate(parse(parser, rest))

    def read(kind: type[E]) -> E:
        return kind(**{f.name: values[f.name] for f in fields(kind)})

    return source, read(SubjectOptions), read(options_class)


def _stopped() -> int:
    """Say that a signal ended the training; the exit code asks schedulers to try again."""
    _say("Stopped and saved: run the same command again to go on.")
    return os.EX_TEMPFAIL


def _say(text: str) -> None:
    """Print once, from however many processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _add_run_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str | None, default=None, help="The run directory.")
    resume: object = Resume
    parser.add_argument(
        "--resume",
        type=resume,
        default="auto",
        help="auto goes on where the run directory is; never refuses to; must refuses to start anew.",
    )


def _out(options: Namespace, what: str = "DIR") -> Path:
    if not options.out:
        raise UserError(f"Say where the results go: --out {what}.")
    return Path(options.out)


def _parse_recipe(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Config, Namespace]:
    """Parse `RECIPE [overrides]` or `--config FILE [overrides]`; returns the config and all parsed options."""
    command = parser.prog
    parser.usage = f"{command} RECIPE [options]\n       {command} --config FILE [options]"
    parser.epilog = f"Recipes: {', '.join(RECIPES)}."
    named = bool(arguments) and not arguments[0].startswith("-")
    rest = arguments[1:] if named else arguments
    if not named and not any(a.split("=")[0] in ("--config", "-h", "--help") for a in rest):
        raise UserError(f"Name a recipe: {command} RECIPE, one of {', '.join(RECIPES)}.")
    recipe = find(arguments[0]) if named else None
    add_config(parser, recipe.config if recipe else Config())
    options = parse(parser, rest)
    given = frozenset(argument.split("=")[0] for argument in rest)
    if recipe and recipe.adapt:  # the recipe looks at the user's data; what the user said still wins
        parser.set_defaults(asdict(recipe.adapt(read_config(parser, options), given)))
        options = parse(parser, rest)
    config = read_config(parser, options)
    # A network is tested at the size at which it is trained.
    if "--data.image_size" in given and "--eval_data.image_size" not in given:
        config = replace(config, eval_data=replace(config.eval_data, image_size=config.data.image_size))
    return config, options
