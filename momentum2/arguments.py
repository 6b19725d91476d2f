"""Command-line arguments to typed configs, and a parser's complaints to sentences."""

import re
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from momentum2.config import Config
from momentum2.errors import UserError
from momentum2.spelling import translate

_NOT_YAML = "The file given with --config is not a YAML file of settings."
_TYPES = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text"}


def make_parser(command: str, description: str) -> ArgumentParser:
    """A parser for `momentum2 COMMAND` whose mistakes are `UserError`s when read with `parse`."""
    return ArgumentParser(prog=f"momentum2 {command}", description=description, exit_on_error=False)


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """Parse, or raise a `UserError` with one sentence."""
    try:
        return parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise UserError(_sentence(str(error), parser)) from None
    except UnicodeDecodeError:
        raise UserError(_NOT_YAML) from None


def add_config(parser: ArgumentParser, defaults: Config) -> None:
    """Add `--config FILE` and a flag for every field of `Config`."""
    parser.add_argument(
        "--config", action="config", help="YAML file of settings, such as a run's config.yaml"
    )
    add_options(parser, Config)
    parser.set_defaults(asdict(defaults))


def add_options(parser: ArgumentParser, options: type) -> None:
    """Add a flag for every field of a dataclass, `--section.field` for those of its sections."""
    parser.add_class_arguments(options, None, as_group=True, sub_configs=False)
    for action in parser._actions:  # a flag for a section as a whole would want a file of its own
        if action.metavar == "CONFIG" and action.dest != "config":
            action.help = SUPPRESS


def read_config(parser: ArgumentParser, options: Namespace) -> Config:
    """The `Config` in parsed options."""
    values = parser.instantiate(options)
    return Config(**{f.name: values[f.name] for f in fields(Config)})


def config_from_file(path: Path) -> Config:
    """The `Config` in a YAML file, such as a run's `config.yaml`; what it leaves out has its default."""
    parser = make_parser("", "")
    add_config(parser, Config())
    read = yaml.safe_load(path.read_text(encoding="utf-8"))
    flat = {f"{section}.{name}": v for section, values in read.items() for name, v in values.items()}
    new = translate(flat, {}, None)
    nested: dict[str, dict[str, object]] = {}
    for key, value in new.items():
        nested.setdefault(key.split(".")[0], {})[key.split(".")[1]] = value
    return read_config(parser, parser.parse_object(nested))


def _sentence(message: str, parser: ArgumentParser) -> str:
    unknown = re.match(r"unrecognized arguments: (\S+)", message)
    if unknown:
        word = unknown.group(1).split("=")[0]
        if not word.startswith("-"):
            return f"{word!r} is one argument too many; {parser.prog} --help shows the usage."
        known = [option for action in parser._actions for option in action.option_strings]
        close = get_close_matches(word, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"{parser.prog} --help lists them all."
        return f"There is no option {word}; {hint}"
    section = re.match(r'Parser key "(\w+)":\s+Unable to load config', message)
    if section and section[1] != "config":
        known = [o for o in parser._option_string_actions if o.startswith(f"--{section[1]}.")]
        example = next((o for o in known if o.endswith(".root")), known[0])
        return f"There is no option --{section[1]}; did you mean {example}?"
    if message.startswith("Unexpected config") or "Unable to load config" in message:
        return _NOT_YAML
    wrong = re.match(r'Parser key "([\w.]+)":(.*)(?:Got|Given) value: (.*)', message, re.DOTALL)
    if wrong:
        key, expected, value = wrong.groups()
        kinds = [
            ", ".join(c.strip("' ") for c in m.split(",")) for m in re.findall(r"Literal\[(.*?)\]", expected)
        ]
        kinds += [
            _TYPES[t] for t in re.findall(r"<class '(\w+)'>", expected.split("Errors:")[0]) if t in _TYPES
        ]
        return f"--{key} takes {' or '.join(dict.fromkeys(kinds))}, not {value.strip()!r}."
    return " ".join(message.removeprefix('Parser key "config": ').split()).rstrip(".") + "."
