"""Every command: its options, and the function that they go to. What a command needs is imported when it is used."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from momentum2.cli.options import ConfigFile, Options, Positional, Words
from momentum2.config import Config, Count, Limits, Network, Processes, Resume, Tracker
from momentum2.errors import SettingError, Stopped, UserError, shown
from momentum2.terminal import is_first

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from momentum2.detection.presets import DetectConfig
    from momentum2.evaluate.subject import SubjectOptions

_RUN = Positional(
    "RUN", "A run directory, one of its checkpoints, an encoder.safetensors or another file of weights."
)


@dataclass(frozen=True)
class Command:
    """One command.

    Args:
        description: What it does; the list of commands has the first sentence.
        usage: What follows it, one line each.
        options: Makes its options.
        run: Does it; returns the exit code.
        defaults: The settings that its help shows as defaults.
    """

    description: str
    usage: str
    options: Callable[[], Options]
    run: Callable[[Words], int]
    defaults: Callable[[Words], "DataclassInstance | None"] = lambda words: None


# -- recipes, plan, pretrain, views


def recipes(words: Words) -> int:
    """List the recipes, or show one."""
    import yaml
    from rich.console import Console
    from rich.table import Table

    from momentum2 import api
    from momentum2.recipes import find

    name = words.at_most_one()
    if name is not None:
        recipe = find(name)
        print(f"{recipe.summary}\n\n  {recipe.command}\n\nexpect: {recipe.expect}\n")
        if recipe.adapt:
            print(
                f"# Before it has seen your images; momentum2 plan {name} --data.root DIR shows what it makes of them."
            )
        print(yaml.safe_dump(asdict(recipe.config), sort_keys=False), end="")
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("recipe", "what it is", "expect"):
        table.add_column(column)
    for name, recipe in api.list_recipes().items():
        table.add_row(name, recipe.summary, recipe.expect)
    Console().print(table)
    return 0


def backbones(words: Words) -> int:
    """List backbones by name."""
    import torch

    from momentum2 import backbones

    pattern = words.at_most_one()
    names = backbones.listed(pattern)
    if not names:
        raise UserError(f"No backbone matches {pattern!r}. Try a pattern such as '*vit*'.")
    if len(names) > 100:
        print("\n".join(names))
        print(
            f"\n{len(names):,} backbones. A pattern that matches at most 100, such as 'timm/convnext*', shows their "
            "parameters."
        )
        return 0
    for name in names:
        with torch.device("meta"):
            count = backbones.fit.parameters_of(backbones.create(name))
        print(f"{name:<60} {count / 1e6:>8.1f} M parameters", flush=True)
    return 0


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for.

    Args:
        processes: Number of processes.
        images: Number of images, instead of opening the data.
        probe: Time a few steps to estimate the duration.
    """

    processes: Processes = 1
    images: Count | None = None
    probe: bool = False


def plan(words: Words) -> int:
    """Show what a recipe resolves to."""
    options, config = words.read(PlanOptions()), _config(words)
    from momentum2 import api

    lines = api.plan(config, images=options.images, processes=options.processes, probe=options.probe)
    for name, value in lines:
        _say(f"{name:<12}{value}")
    return 0


@dataclass(frozen=True)
class PretrainOptions:
    """Where the results go.

    Args:
        out: The run directory.
        resume: auto: resume or start. never: only start. must: only resume.
    """

    out: str | None = None
    resume: Resume = "auto"


def pretrain(words: Words) -> int:
    """Train."""
    options = words.read(PretrainOptions())
    out, config = _out(options.out, "Choose a run directory with --out DIR."), _config(words)
    from momentum2 import api
    from momentum2.training.device import keep_large_blocks

    keep_large_blocks()
    run = api.pretrain(config, out, resume=options.resume)
    return 0 if run.finished else _stopped()


@dataclass(frozen=True)
class ViewsOptions:
    """What is drawn.

    Args:
        out: The image file to write.
        count: Number of images.
    """

    out: str = "views.png"
    count: Annotated[int, Limits(1, 1000)] = 8


def views(words: Words) -> int:
    """Draw a contact sheet."""
    from momentum2 import api

    source, options = words.one(), words.read(ViewsOptions())
    with words.naming_files():
        _wrote(api.views(source, options.out, count=options.count, overrides=words.settings))
    return 0


@dataclass(frozen=True)
class StatsOptions:
    """What is looked at.

    Args:
        count: Number of images, evenly spaced.
    """

    count: Count = 256


def stats(words: Words) -> int:
    """Print the ranges of values and the flags that fit."""
    from momentum2 import api
    from momentum2.data.statistics import PERCENTILES

    source, options = words.one(), words.read(StatsOptions())
    with words.naming_files():
        found = api.stats(source, count=options.count, overrides=words.settings)
    names = ("least", *(f"{p:g}%" for p in PERCENTILES[1:-1]), "largest")
    print(f"{found.images:,} images, {found.kind} values")
    print("channel" + "".join(f"{name:>12}" for name in names) + f"{'mean':>10}{'std':>10}")
    for c, row in enumerate(found.percentiles):
        cells = "".join(f"{value:>12.6g}" for value in row)
        print(f"{c:>7}{cells}{found.mean[c]:>10.4f}{found.std[c]:>10.4f}")
    print(" ".join(f"--{name} {value}" for name, value in found.settings.items()))
    return 0


def _recipe() -> Positional:
    from momentum2.recipes import RECIPES

    words = (
        "A recipe; momentum2 recipes lists them. The defaults below are its own, or those without a recipe."
    )
    return Positional("RECIPE", words, tuple(RECIPES))


def _recipe_options(options: "DataclassInstance") -> Options:
    return Options(_recipe(), (options, ConfigFile()), Config())


def _recipe_defaults(words: Words) -> Config:
    from momentum2.recipes import find

    name = words.at_most_one()
    return Config() if name is None else find(name).config


def _config(words: Words) -> Config:
    """The config of `RECIPE [options]` or `--config FILE [options]`."""
    from momentum2.recipes import configure, find

    name = words.at_most_one() if "config" in words.options else words.one()
    with words.naming_files():
        return configure(None if name is None else find(name), words.settings, words.copied)


# -- evaluate, embed


@dataclass(frozen=True)
class ImagesOption:
    """The images.

    Args:
        data: A folder of images, an archive, a list, a table, shards or shapes (default: the run's eval_data). For more
            control, use data.name, data.root and so on.
    """

    data: str | None = None


def _evaluate(words: Words, kind: str) -> int:
    from momentum2 import api

    options, subject, source = words.read(_evaluations()[kind]), _subject_options(words), words.one()
    measure = {"knn": api.evaluate_knn, "linear": api.evaluate_linear, "semi": api.evaluate_semi}[kind]
    try:
        measure(source, options=options, subject=subject)  # type: ignore[operator]
    except Stopped:
        return _stopped()
    return 0


def _evaluations() -> dict[str, "DataclassInstance"]:
    """The options of each evaluation."""
    from momentum2.evaluate.knn import KnnOptions
    from momentum2.evaluate.linear import LinearOptions
    from momentum2.evaluate.semi import SemiOptions

    return {"knn": KnnOptions(), "linear": LinearOptions(), "semi": SemiOptions()}


def _embed_options() -> Options:
    from momentum2.evaluate.embed import EmbedOptions

    return _on_images(EmbedOptions())


def embed(words: Words) -> int:
    """Write features to a file."""
    from momentum2 import api
    from momentum2.evaluate.embed import EmbedOptions

    out = words.read(EmbedOptions()).out or ""
    found = api.embed(words.one(), out=out, subject=_subject_options(words))
    _say(f"Wrote the features of {len(found.features):,} images to {out}")
    return 0


@dataclass(frozen=True)
class SearchFiles:
    """In what is searched.

    Args:
        in_: The features of the images to search in: a file that momentum2 embed wrote.
        out: Also write a page that shows the images found, such as search.html.
        data: Where the images are (default: where they were when the features were made).
    """

    in_: str | None = None
    out: str | None = None
    data: str | None = None


def _search_options() -> Options:
    from momentum2.evaluate.search import SearchOptions

    about = Positional("RUN IMAGE", "A run directory or file of weights, then one or more image files.")
    return Options(about, (SearchFiles(), SearchOptions()))


def search(words: Words) -> int:
    """Find the nearest images."""
    from momentum2 import api
    from momentum2.evaluate.search import SearchOptions

    (run, *images), files = words.some(), words.read(SearchFiles())
    if not images:
        raise UserError("Missing argument IMAGE. Pass the run, then one or more image files.")
    if files.in_ is None:
        raise UserError("Choose the features to search in with --in FILE; momentum2 embed writes them.")
    options = words.read(SearchOptions())
    found = api.search(run, images, files.in_, options=options, out=files.out, data=files.data)
    for one in found:
        _say(f"{one.image}:")
        for name, similarity in zip(one.names, one.similarity.tolist(), strict=True):
            _say(f"  {similarity:6.3f}  {name}")
    _wrote(files.out)
    return 0


@dataclass(frozen=True)
class SelectFiles:
    """What is written.

    Args:
        out: A table (.csv), or a page that shows the images (.html).
        keep: A list file (.txt) to train on: the diverse images, or all that are not duplicates or outliers.
        data: Where the images are (default: where they were when the features were made).
    """

    out: str | None = None
    keep: str | None = None
    data: str | None = None


def _select_options() -> Options:
    from momentum2.evaluate.selection import SelectOptions

    about = Positional("FEATURES", "A file that momentum2 embed wrote.")
    return Options(about, (SelectOptions(), SelectFiles()))


def select(words: Words) -> int:
    """Select images."""
    from momentum2 import api
    from momentum2.evaluate.selection import SelectOptions

    options, files = words.read(SelectOptions()), words.read(SelectFiles())
    if options.by is None:
        raise UserError("Choose what to select with --by: duplicates, outliers or diverse.")
    found = api.select(
        words.one(), options.by, options=options, out=files.out, keep=files.keep, data=files.data
    )
    _say(f"{len(found.names):,} of {len(found.names) + len(found.rest):,} images: {options.by}")
    for name, similarity in list(zip(found.names, found.similarity.tolist(), strict=True))[:_LISTED]:
        _say(f"  {similarity:6.3f}  {name}")
    if len(found.names) > _LISTED:
        _say(f"  ... and {len(found.names) - _LISTED:,} more")
    _wrote(files.out, files.keep)
    return 0


_LISTED = 20  # selected images that are printed


@dataclass(frozen=True)
class RunsOptions:
    """The table.

    Args:
        out: Also write it to this file, which ends in .csv.
    """

    out: str | None = None


def runs(words: Words) -> int:
    """Show a table of runs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from momentum2 import api
    from momentum2.runs.table import columns

    out = words.read(RunsOptions()).out
    header, *rows = columns(api.compare_runs(words.one(), out))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(Text(shown(name)), overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    console = Console()
    # A pipe has no width: what reads it gets one line for each run.
    (console if console.is_terminal else Console(width=10_000)).print(table)
    _wrote(out)
    return 0


def _on_images(options: "DataclassInstance") -> Options:
    from momentum2.evaluate.subject import SubjectOptions

    return Options(_RUN, (options, ImagesOption()), SubjectOptions())


def _subject_options(words: Words) -> "SubjectOptions":
    """What is evaluated on what: the run's own evaluation data, unless other images are named."""
    from momentum2.data.opening import find_data
    from momentum2.evaluate.subject import SubjectOptions, data_of

    data, named = data_of(words.one()), words.read(ImagesOption()).data
    return words.override(SubjectOptions(data=data if named is None else find_data(named, data)))


# -- detect


@dataclass(frozen=True)
class DetectOptions:
    """What is done, and where the results go.

    Args:
        out: The run directory, or where other results go.
        resume: auto: resume or start. never: only start. must: only resume.
        eval_only: Evaluate the fine-tuned detector in RUN.
        images: Run the detector in RUN on this folder.
    """

    out: str | None = None
    resume: Resume = "auto"
    eval_only: bool = False
    images: str | None = None


def _detect_options() -> Options:
    from momentum2.detection.presets import DetectConfig

    return Options(_RUN, (DetectOptions(), ConfigFile()), DetectConfig())


def _detect_defaults(words: Words) -> "DetectConfig":
    from momentum2.detection.presets import DetectConfig, preset

    config = words.override(DetectConfig())
    name, root = config.data.name, config.data.root
    if root is not None and "data.name" not in words.settings:
        from momentum2.detection.data import kind_in

        name = kind_in(root)
    return preset(
        config.model, name, config.encoder.backbone if "encoder.backbone" in words.settings else None
    )


def detect(words: Words) -> int:
    """Fine-tune a detector."""
    from momentum2 import api

    run, options = words.at_most_one(), words.read(DetectOptions())
    if options.eval_only or options.images is not None:
        if run is None:
            raise UserError("Missing argument RUN: the run of the fine-tuned detector.")
        if options.eval_only and options.images is not None:
            raise SettingError(
                "images", "runs the detector, while --eval-only evaluates it. Choose one of the two."
            )
        if options.resume != "auto":
            raise SettingError("resume", "is for training. Leave it out.")
        with words.naming_files():
            if options.images is None:
                api.evaluate_detector(run, overrides=words.settings, out=options.out or None)
            else:
                api.detect_images(run, options.images, overrides=words.settings, out=options.out or None)
        return 0
    out = _out(options.out, "Choose a run directory with --out DIR.")
    # The settings of this model on these data are the defaults; what was given still wins.
    config = words.override(_detect_defaults(words))
    return 0 if api.detect(config, out, run, resume=options.resume) else _stopped()


# -- export, report, watch, reproduce


@dataclass(frozen=True)
class ExportOptions:
    """What is written.

    Args:
        format: The tool: torchvision, timm, detectron2, onnx or huggingface.
        out: The folder to write; it must not exist yet.
        network: teacher (where there is one) or student.
        recalibrate: Images on which to measure the batch-norm statistics again.
        license: License of the weights, for the model card.
    """

    format: str | None = None
    out: str | None = None
    network: Network | None = None
    recalibrate: str | None = None
    license: str = "unknown"


def export(words: Words) -> int:
    """Write weights for other tools."""
    from momentum2 import api
    from momentum2.export import FORMATS

    source, o = words.one(), words.read(ExportOptions())
    if o.format is None:
        raise UserError(f"Choose a format with --format: {', '.join(FORMATS)}.")
    out = _out(o.out, "Choose a folder with --out FOLDER.")
    lines = api.export_encoder(
        source, o.format, out, network=o.network, recalibrate=o.recalibrate, license=o.license
    )
    _say(f"Wrote {out}. To load it:")
    print(f"\n{lines}")
    return 0


@dataclass(frozen=True)
class PageOptions:
    """The page.

    Args:
        out: The file to write (default: report.html in the run).
    """

    out: str | None = None


def _report_options() -> Options:
    from momentum2.report.learned import ReportOptions

    return Options(Positional("RUN", "A run directory, or several."), (PageOptions(), ReportOptions()))


def report(words: Words) -> int:
    """Write the HTML page."""
    from momentum2 import api
    from momentum2.report.learned import ReportOptions

    _wrote(api.write_report(words.some(), words.read(PageOptions()).out, words.read(ReportOptions())))
    return 0


@dataclass(frozen=True)
class WatchOptions:
    """Where the page is served.

    Args:
        port: Port on 127.0.0.1; 0 picks a free one.
    """

    port: Annotated[int, Limits(0, 65535)] = 8010


def watch(words: Words) -> int:
    """Serve the live page."""
    from momentum2 import api

    api.watch(words.one(), words.read(WatchOptions()).port)
    return 0


def _reproduce_options() -> Options:
    from momentum2.reproduce import TABLES
    from momentum2.reproduce.command import STABILITY, ReproduceOptions

    tables = Positional("TABLE", "A table of the paper, or stability.", (*TABLES, STABILITY))
    return Options(tables, (ReproduceOptions(),))


def reproduce(words: Words) -> int:
    """Run a table of the paper."""
    from momentum2 import api
    from momentum2.reproduce.command import ReproduceOptions

    try:
        text = api.reproduce_table(words.one(), words.read(ReproduceOptions()))
    except Stopped:
        return _stopped()
    for line in text.split("\n"):
        print(shown(line, 10_000))
    return 0


@dataclass(frozen=True)
class LogOptions:
    """Where it goes.

    Args:
        to: tensorboard, wandb or mlflow.
    """

    to: Tracker | None = None


def log(words: Words) -> int:
    """Send a log to a tracker."""
    from momentum2.runs.trackers import send  # torch is not needed for it

    to = words.read(LogOptions()).to
    if to is None:
        raise UserError("Choose where to send it with --to: tensorboard, wandb or mlflow.")
    count = send(Path(words.one()), to)
    _say(f"Sent {count:,} records to {to}." if count else f"{to} has everything already.")
    return 0


def doctor(words: Words) -> int:
    """Say what a bug report needs."""
    from momentum2 import api

    words.at_most_one()
    for name, value in api.doctor():
        _say(f"{name:<14}{value}")
    return 0


# -- what they share


def _out(out: str | None, sentence: str) -> Path:
    if not out:
        raise UserError(sentence)
    return Path(out)


def _wrote(*paths: str | Path | None) -> None:
    for path in filter(None, paths):
        _say(f"Wrote {path}")


def _stopped() -> int:
    """Say that a signal ended the training; the exit code asks schedulers to try again."""
    _say("Stopped; everything is saved. Run the same command again to resume.")
    return os.EX_TEMPFAIL


def _say(text: str) -> None:
    """Print a line, from however many processes once."""
    if is_first():
        print(shown(text, 2_000))


_RECIPE_USAGE = "RECIPE [options]\n--config FILE [options]"
_IMAGES_USAGE = "RUN [--data PATH] [options]"
_DATA = Positional(
    "DATA", "A folder of images, an archive, a list, a table, shards, a URL of these, or shapes."
)

COMMANDS: dict[str, Command] = {
    "recipes": Command(
        "List the named recipes with their headline numbers. With a name, show that recipe in full.",
        "[RECIPE]",
        lambda: Options(_recipe()),
        recipes,
    ),
    "backbones": Command(
        "List the networks that can be pretrained. A pattern such as 'timm/vit_tiny*' also shows their parameters.",
        "[PATTERN]",
        lambda: Options(Positional("PATTERN", "A name, or part of it with * for any characters.")),
        backbones,
    ),
    "plan": Command(
        "Resolve a recipe: steps, learning rate, momentums, BN batch, memory, time. Trains nothing.",
        _RECIPE_USAGE,
        lambda: _recipe_options(PlanOptions()),
        plan,
        _recipe_defaults,
    ),
    "views": Command(
        "Draw some images and, next to each, the views that the network sees.",
        "DATA --out views.png [options]",
        lambda: Options(_DATA, (ViewsOptions(), ConfigFile()), Config()),
        views,
    ),
    "stats": Command(
        "Look at the values of some images: their range in each channel, and the flags to use (window, mean, std).",
        "DATA [options]",
        lambda: Options(_DATA, (StatsOptions(), ConfigFile()), Config()),
        stats,
    ),
    "pretrain": Command(
        "Pretrain into a run directory. The same command resumes it.",
        _RECIPE_USAGE,
        lambda: _recipe_options(PretrainOptions()),
        pretrain,
        _recipe_defaults,
    ),
    "evaluate knn": Command(
        "Classify test images by their nearest training images.",
        _IMAGES_USAGE,
        lambda: _on_images(_evaluations()["knn"]),
        lambda words: _evaluate(words, "knn"),
    ),
    "evaluate linear": Command(
        "Train a linear classifier on the frozen encoder.",
        _IMAGES_USAGE,
        lambda: _on_images(_evaluations()["linear"]),
        lambda words: _evaluate(words, "linear"),
    ),
    "evaluate semi": Command(
        "Fine-tune the whole network on some of the labels.",
        _IMAGES_USAGE,
        lambda: _on_images(_evaluations()["semi"]),
        lambda words: _evaluate(words, "semi"),
    ),
    "detect": Command(
        "Fine-tune a detector on an encoder, or use one; COCO and LVIS metrics. RUN is a run directory or a file of "
        "weights; the same command resumes. The defaults depend on --model and --data.name: the paper's for coco "
        "and lvis, minutes on a laptop for shapes. With --eval-only or --images, RUN is the run directory of "
        "an earlier fine-tuning.",
        "[RUN] --out DIR [options]\nRUN --eval-only [options]\nRUN --images FOLDER [options]",
        _detect_options,
        detect,
        _detect_defaults,
    ),
    "embed": Command(
        "Write the features of images, with their names and labels, to a file.",
        _IMAGES_USAGE,
        _embed_options,
        embed,
    ),
    "search": Command(
        "Find the images most similar to one, by their features. All are compared, so the answer is exact.",
        "RUN IMAGE [IMAGE ...] --in features.npz [--out search.html] [options]",
        _search_options,
        search,
    ),
    "select": Command(
        "Select images by their features: duplicates, outliers or diverse ones. All are compared: n images take n² "
        "comparisons for duplicates and outliers, and count × n for diverse ones.",
        "FEATURES --by duplicates|outliers|diverse [--out FILE] [options]",
        _select_options,
        select,
    ),
    "runs": Command(
        "Show a table of the runs in a folder, with their results and the settings that differ.",
        "DIR [--out runs.csv]",
        lambda: Options(Positional("DIR", "A folder with run directories."), (RunsOptions(),)),
        runs,
    ),
    "report": Command(
        "Write one self-contained HTML page about a run, or several side by side.",
        "RUN [RUN ...] [options]",
        _report_options,
        report,
    ),
    "watch": Command(
        "Serve a live report of a run on this machine. Press Ctrl-C to stop.",
        "RUN [--port 8010]",
        lambda: Options(Positional("RUN", "A run directory."), (WatchOptions(),)),
        watch,
    ),
    "reproduce": Command(
        "Run a table of the paper and print it next to the paper's numbers. Each row is run with each seed, and what "
        "is finished is not run again: the same command resumes after any interruption. smoke takes minutes on the "
        "built-in shapes and shows that everything works; cifar is the same comparison on CIFAR-10 (image files in "
        "train/ and test/), about two minutes of one core per row and seed; paper has the "
        "published settings. stability is not a table: it measures, in one training run per seed, how much the targets "
        "of a teacher owe to the other images of their batch, by its norm and the samples per device.",
        "TABLE [--scale smoke|cifar|paper] [options]",
        _reproduce_options,
        reproduce,
    ),
    "export": Command(
        "Export an encoder to torchvision, timm, detectron2, ONNX or Hugging Face. A model card and loading code come "
        "with it.",
        "RUN --format FORMAT --out FOLDER [options]",
        lambda: Options(_RUN, (ExportOptions(),)),
        export,
    ),
    "log": Command(
        "Send what a run logged to TensorBoard, Weights & Biases or MLflow. Each record is sent once, whether by this "
        "command or while the run trains (--monitor.wandb and so on).",
        "RUN --to tensorboard|wandb|mlflow",
        lambda: Options(Positional("RUN", "A run directory."), (LogOptions(),)),
        log,
    ),
    "doctor": Command(
        "Show versions, devices, cores, memory, disk and decoding speed, for bug reports.",
        "",
        Options,
        doctor,
    ),
}
