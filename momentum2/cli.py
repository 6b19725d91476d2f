"""The command line: a command is a function of its arguments. Expected mistakes are one sentence and exit code 2."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table

from momentum2 import __version__
from momentum2.arguments import add_config, make_parser, parse, read_config
from momentum2.config import Config, Resume
from momentum2.errors import ProcessLost, SaidElsewhere, UserError
from momentum2.recipes import RECIPES, find


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
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
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
    """List the recipes."""
    parse(make_parser("recipes", "List the named recipes with their headline numbers."), arguments)
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
    parser = make_parser("plan", "Resolve a recipe: steps, learning rate, momenta, BN batch, memory; trains nothing.")
    parser.add_argument("--processes", type=int, default=1, help="Number of processes to plan for.")
    parser.add_argument("--images", type=int | None, default=None, help="Number of images, instead of opening the data.")
    parser.add_argument("--probe", type=bool, default=False, help="Time a few steps to estimate the duration.")
    config, options = _parse_recipe(parser, arguments)
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

    out = _out(options)
    finished = run(config, out, options.resume, online_knn(config))
    if finished:
        print(f"Done: the encoder is {out / 'encoder.safetensors'}")
    return 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "recipes": (recipes, "list the named recipes with their headline numbers"),
    "plan": (plan, "resolved settings of a recipe, memory and time; trains nothing"),
    "pretrain": (pretrain, "pretrain into a run directory, or resume it"),
}


def _add_run_options(parser: ArgumentParser) -> None:
    parser.add_argument("--out", type=str | None, default=None, help="The run directory.")
    resume: object = Resume
    parser.add_argument(
        "--resume",
        type=resume,
        default="auto",
        help="auto goes on where the run directory is; never refuses to; must refuses to start anew.",
    )


def _out(options: Namespace) -> Path:
    if options.out is None:
        raise UserError("Say where the run directory goes: --out DIR.")
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
    if recipe and recipe.adapt:  # the recipe looks at the user's data; what the user said still wins
        parser.set_defaults(asdict(recipe.adapt(read_config(parser, options))))
        options = parse(parser, rest)
    return read_config(parser, options), options
