"""The command line: a command is a function of its arguments. Expected mistakes are one sentence and exit code 2."""

import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.table import Table

from momentum2 import __version__
from momentum2.arguments import ConfigFile, Options, Words
from momentum2.config import Config, Count, DataConfig, Network, Resume
from momentum2.data import open_dataset
from momentum2.distributed import world_size
from momentum2.errors import ProcessLost, SaidElsewhere, SettingError, UserError
from momentum2.recipes import RECIPES, find, find_data, typical_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from momentum2.evaluate.subject import SubjectOptions

_RECIPE_USAGE = "RECIPE [options]\n--config FILE [options]"
_RECIPE_LIST = f"Recipes: {', '.join(RECIPES)}."


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
    except SettingError as error:
        print(f"momentum2: {error.told('--')}", file=sys.stderr)
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
    options = Options(
        "recipes", "List the named recipes with their headline numbers, or show one whole.", "[RECIPE]"
    )
    words = options.parse(arguments)
    if words.help:
        return options.show()
    name = words.at_most_one()
    if name is not None:
        recipe = find(name)
        print(f"{recipe.summary}\n\n  {recipe.command}\n\nexpect: {recipe.expect}\n")
        print(yaml.safe_dump(asdict(recipe.config), sort_keys=False), end="")
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recipe", "what it is", "expect"):
        table.add_column(column)
    for name, build in RECIPES.items():
        recipe = build()
        table.add_row(name, recipe.summary, recipe.expect)
    Console().print(table)
    return 0


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for.

    Args:
        processes: Number of processes to plan for.
        images: Number of images, instead of opening the data.
        probe: Time a few steps to estimate the duration.
    """

    processes: Count = 1
    images: Count | None = None
    probe: bool = False


def plan(arguments: list[str]) -> int:
    """Show what a recipe comes to."""
    options = Options(
        "plan",
        "Resolve a recipe: steps, learning rate, momenta, BN batch, memory; trains nothing.",
        _RECIPE_USAGE,
        (PlanOptions(), ConfigFile()),
        Config(),
        _RECIPE_LIST,
    )
    words = options.parse(arguments)
    if words.help:
        return options.show(_base(words))
    planning, config = words.read(PlanOptions()), _config(words)
    from momentum2.engine.estimate import planned

    for name, value in planned(config, planning.images, planning.processes, planning.probe):
        print(f"{name:<12}{value}")
    return 0


@dataclass(frozen=True)
class RunOptions:
    """Where the results go.

    Args:
        out: The run directory.
        resume: auto resumes a run or starts one; never only starts; must only resumes.
    """

    out: str | None = None
    resume: Resume = "auto"


def pretrain(arguments: list[str]) -> int:
    """Train."""
    options = Options(
        "pretrain",
        "Pretrain into a run directory; the same command resumes it.",
        _RECIPE_USAGE,
        (RunOptions(), ConfigFile()),
        Config(),
        _RECIPE_LIST,
    )
    words = options.parse(arguments)
    if words.help:
        return options.show(_base(words))
    run_options, config = words.read(RunOptions()), _config(words)
    from momentum2.engine.pretrain import pretrain as run
    from momentum2.evaluate.online import online_knn
    from momentum2.report.page import write_last_report

    out = _out(run_options.out)
    finished = run(config, out, run_options.resume, online_knn)
    if not finished:
        return _stopped()
    _say(f"Done: the encoder is {out / 'encoder.safetensors'}")
    if config.monitor.report and os.environ.get("RANK", "0") == "0":
        _say(write_last_report(out))
    return 0


@dataclass(frozen=True)
class ViewsOptions:
    """What is drawn.

    Args:
        out: The picture to write.
        count: Number of images.
    """

    out: str = "views.png"
    count: Count = 8


def views(arguments: list[str]) -> int:
    """Draw a contact sheet."""
    options = Options(
        "views",
        "Write a picture of some images and, beside each, the views that the network sees.",
        "DATA --out views.png [options]",
        (ViewsOptions(), ConfigFile()),
        Config(),
    )
    words = options.parse(arguments)
    if words.help:
        return options.show()
    source, drawing = words.one("DATA (a folder, archive, list or shapes)"), words.read(ViewsOptions())
    data = find_data(source, DataConfig(image_size=32) if source == "shapes" else DataConfig())
    data = replace(data, image_size=typical_size(open_dataset(replace(data, cache="off"))))
    from momentum2.data.contact_sheet import write_views

    write_views(words.override(Config(data=data)), Path(drawing.out), drawing.count)
    print(f"Wrote {drawing.out}")
    return 0


@dataclass(frozen=True)
class DataOption:
    """The images, in one word.

    Args:
        data: A folder, archive or list of images, or shapes; --data.root and the others say more.
    """

    data: str | None = None


def evaluate(arguments: list[str]) -> int:
    """Measure an encoder."""
    kinds = ("knn", "linear", "semi")
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"usage: momentum2 evaluate {'|'.join(kinds)} RUN [options]; each has a --help of its own.")
        return 0
    if not arguments or arguments[0] not in kinds:
        raise UserError("Choose an evaluation: momentum2 evaluate knn, linear or semi.")
    from momentum2.evaluate.knn import KnnOptions, evaluate_knn
    from momentum2.evaluate.linear import LinearOptions, evaluate_linear
    from momentum2.evaluate.results import Result, report
    from momentum2.evaluate.semi import SemiOptions, evaluate_semi
    from momentum2.evaluate.subject import Subject, open_subject

    kind, rest = arguments[0], arguments[1:]
    how: KnnOptions | LinearOptions | SemiOptions
    if kind == "knn":
        description, how = "Classify test images by their nearest training images.", KnnOptions()
    elif kind == "linear":
        description, how = "Train a linear classifier on the frozen encoder.", LinearOptions()
    else:
        description, how = "Fine-tune the whole network on some of the labels.", SemiOptions()
    options, words = _parse_subject(f"evaluate {kind}", description, rest, how)
    if words.help:
        return options.show()
    how = words.read(how)

    def run(subject: Subject) -> Result | None:
        if isinstance(how, KnnOptions):
            return evaluate_knn(subject, how)
        return (
            evaluate_linear(subject, how) if isinstance(how, LinearOptions) else evaluate_semi(subject, how)
        )

    with open_subject(words.one("RUN"), _subject_options(words)) as subject:
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
    options, words = _parse_subject("embed", description, arguments, EmbedOptions())
    if words.help:
        return options.show()
    place = words.read(EmbedOptions())
    with open_subject(words.one("RUN"), _subject_options(words)) as subject:
        count = run(subject, place)
    print(f"Wrote the features of {count:,} images to {place.out}")
    return 0


@dataclass(frozen=True)
class ExportOptions:
    """What is written.

    Args:
        format: The tool: torchvision, timm, detectron2, onnx or huggingface.
        out: The folder to write; it must not exist yet.
        network: teacher or student (default: by method.export).
        recalibrate: Images on which the batch-norm statistics are measured again.
        licence: Licence of the weights, for the model card.
    """

    format: str | None = None
    out: str | None = None
    network: Network | None = None
    recalibrate: str | None = None
    licence: str = "unknown"


def export(arguments: list[str]) -> int:
    """Write weights for other tools."""
    from momentum2.export import FORMATS
    from momentum2.export import export as run

    options = Options(
        "export",
        "Export an encoder for another tool, with a model card and loading code.",
        "RUN --format FORMAT --out FOLDER [options]",
        (ExportOptions(),),
    )
    words = options.parse(arguments)
    if words.help:
        return options.show()
    source, o = words.one("RUN"), words.read(ExportOptions())
    if o.format is None:
        raise UserError(f"Choose a format with --format: {', '.join(FORMATS)}.")
    lines = run(source, o.format, _out(o.out, "FOLDER"), o.network, o.recalibrate, o.licence)
    print(f"Wrote {o.out}. To load it:\n\n{lines}")
    return 0


def reproduce(arguments: list[str]) -> int:
    """Run a table of the paper."""
    from momentum2.reproduce.command import reproduce as run

    return run(arguments)


@dataclass(frozen=True)
class PageOptions:
    """The page.

    Args:
        out: The page to write (default: report.html in the run).
    """

    out: str | None = None


def report(arguments: list[str]) -> int:
    """Write the HTML page."""
    from momentum2.report.learned import ReportOptions
    from momentum2.report.page import write_report

    options = Options(
        "report",
        "Write one self-contained HTML page about a run, or several side by side.",
        "RUN [RUN ...] [options]",
        (PageOptions(), ReportOptions()),
    )
    words = options.parse(arguments)
    if words.help:
        return options.show()
    if not words.named:
        words.one("RUN [RUN ...]")
    out = words.read(PageOptions()).out
    path = write_report(
        [Path(r) for r in words.named], Path(out) if out else None, words.read(ReportOptions())
    )
    print(f"Wrote {path}")
    return 0


@dataclass(frozen=True)
class WatchOptions:
    """Where it is shown.

    Args:
        port: Port on 127.0.0.1.
    """

    port: int = 8010


def watch(arguments: list[str]) -> int:
    """Serve the live page."""
    from momentum2.report.watch import watch as run

    options = Options(
        "watch",
        "Serve a live report of a run on this machine. Press Ctrl-C to stop.",
        "RUN [options]",
        (WatchOptions(),),
    )
    words = options.parse(arguments)
    if words.help:
        return options.show()
    run(Path(words.one("RUN")), words.read(WatchOptions()).port)
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


def _parse_subject(
    command: str, description: str, arguments: list[str], how: "DataclassInstance"
) -> tuple[Options, Words]:
    """Parse `RUN [--data PATH] [options]`."""
    from momentum2.evaluate.subject import SubjectOptions

    options = Options(
        command, description, "RUN [--data PATH] [options]", (DataOption(), how), SubjectOptions()
    )
    return options, options.parse(arguments)


def _subject_options(words: Words) -> "SubjectOptions":
    """What is evaluated on what: the run's own evaluation data, unless other is named."""
    from momentum2.evaluate.subject import SubjectOptions, data_of

    data, named = data_of(words.one("RUN")), words.read(DataOption()).data
    return words.override(SubjectOptions(data=data if named is None else find_data(named, data)))


def _stopped() -> int:
    """Say that a signal ended the training; the exit code asks schedulers to try again."""
    _say("Stopped and saved: run the same command again to go on.")
    return os.EX_TEMPFAIL


def _say(text: str) -> None:
    """Print once, from however many processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _out(out: str | None, what: str = "DIR") -> Path:
    if not out:
        raise UserError(f"Choose where the results go with --out {what}.")
    return Path(out)


def _base(words: Words) -> Config:
    """The config of the named recipe, or the defaults."""
    name = words.at_most_one()
    return find(name).config if name is not None else Config()


def _config(words: Words) -> Config:
    """The config of `RECIPE [overrides]` or `--config FILE [overrides]`."""
    name = words.at_most_one()
    if name is None and "config" not in words.options:
        raise UserError(f"Missing argument RECIPE. Choose one of {', '.join(RECIPES)}.")
    recipe, config = find(name) if name is not None else None, words.override(_base(words))
    given = frozenset(words.settings)
    if recipe and recipe.adapt:  # the recipe looks at the user's data; what the user said still wins
        config = words.override(recipe.adapt(config, given))
    # A network is tested at the size at which it is trained.
    if "data.image_size" in given and "eval_data.image_size" not in given:
        config = replace(config, eval_data=replace(config.eval_data, image_size=config.data.image_size))
    return config
