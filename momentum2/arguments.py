"""Words of the command line to typed settings, and every option to a line of help.

All options are fields of dataclasses, `--field` or `--section.field`; these say what they take and within which limits.
What was given is known by its name, whether a flag gave it or a file.
"""

import argparse
import inspect
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from momentum2.errors import SettingError, UnknownSetting, UserError
from momentum2.settings import (
    BOOLEANS,
    close_setting,
    kind_of,
    leaves,
    override,
    read_settings,
    takes_none,
    words_of,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

_METAVARS = {"true or false": "true|false", "a whole number": "N", "a number": "X", "text": "TEXT"}


@dataclass(frozen=True)
class ConfigFile:
    """Settings from a file.

    Args:
        config: YAML file of settings, such as a run's config.yaml; flags win over it.
    """

    config: str | None = None


@dataclass(frozen=True)
class Words:
    """What somebody typed after a command.

    Args:
        command: The command.
        named: The words that are not options.
        options: Given options of the command itself, by name.
        settings: Given settings by name, from files and flags; a flag wins over a file.
        files: Of each setting that no flag gave, its file.
        help: Whether help was asked for.
    """

    command: str
    named: tuple[str, ...]
    options: dict[str, object]
    settings: dict[str, object]
    files: dict[str, Path]
    help: bool

    def read(self, base: S) -> S:
        """The command's own options that are fields of `base`; what was not given is as in `base`."""
        known = leaves(type(base))
        return override(base, {name: value for name, value in self.options.items() if name in known})

    def override(self, base: S) -> S:
        """`base` with the given settings."""
        try:
            return override(base, self.settings)
        except SettingError as error:
            raise error.in_file(self.files[error.setting]) if error.setting in self.files else error from None

    def one(self, what: str) -> str:
        """The one named word that the command needs."""
        if not self.named:
            raise UserError(f"Missing argument {what}. Usage: momentum2 {self.command} {what} [options]")
        return self.at_most_one() or ""

    def at_most_one(self) -> str | None:
        if len(self.named) > 1:
            raise UserError(f"Unexpected argument {self.named[1]!r}. See momentum2 {self.command} --help.")
        return self.named[0] if self.named else None


@dataclass(frozen=True)
class Options:
    """The options of a command.

    Args:
        command: The command.
        description: What it does, for its help.
        usage: What follows the command in the line of usage.
        options: Dataclasses of its own options, with their defaults.
        settings: The settings that it takes, if it takes any; its own options come first.
        epilog: The end of its help.
    """

    command: str
    description: str
    usage: str = "[options]"
    options: Sequence["DataclassInstance"] = ()
    settings: "DataclassInstance | None" = None
    epilog: str = ""
    _known: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for part in (self.settings, *self.options):
            self._known.update(leaves(type(part)) if part else {})

    def parse(self, arguments: Sequence[str]) -> Words:
        """Tell options from other words, in any order; a `UserError` for an option that there is not."""
        own = {name for part in self.options for name in leaves(type(part))}
        words, named, files = deque(arguments), list[str](), list[Path]()
        options, settings, help_wanted = dict[str, object](), dict[str, object](), False
        while words:
            word = words.popleft()
            if word == "--":
                named += words
                break
            if word in ("-h", "--help"):
                help_wanted = True
            elif not word.startswith("-") or word == "-":
                named.append(word)
            else:
                name, value = self._option(word, words)
                if name == "config" and name in own:
                    files.append(Path(value or ""))
                (options if name in own else settings)[name] = value
        in_files, sources = dict[str, object](), dict[str, Path]()
        for file in files:
            found = read_settings(file)
            in_files |= found
            sources |= {name: file for name in found if name not in settings}
        return Words(self.command, tuple(named), options, in_files | settings, sources, help_wanted)

    def _option(self, word: str, rest: deque[str]) -> tuple[str, str | None]:
        """Name and value of an option, whose value may be the next word."""
        dashes, name = re.match("--?", word)[0], re.sub("^--?", "", word)  # type: ignore[index]
        name, given, value = name.partition("=")
        name = name.replace("-", "_")
        hint = self._known.get(name)
        # A name with a section may be one of an older version, which the settings know.
        if dashes != "--" or (hint is None and not (self.settings and "." in name)):
            close = close_setting(name, self._known)
            raise UserError(UnknownSetting(name, close).told(dashes if not close else "--"))
        if not given:
            if hint is bool:  # `--probe` alone is true
                value = rest.popleft() if rest and rest[0].lower() in BOOLEANS else "true"
            elif rest and not rest[0].startswith("--"):
                value = rest.popleft()
            else:
                raise UserError(f"--{name} needs a value{f': {kind_of(hint)}' if hint else ''}.")
        nothing = hint is not None and value.lower() in ("none", "null") and takes_none(hint)
        return name, None if nothing else value

    def show(self, *bases: "DataclassInstance") -> int:
        """Print the help, with the defaults that `bases` have; returns the exit code."""
        parser = argparse.ArgumentParser(f"momentum2 {self.command}")
        self.fill(parser, bases)
        parser.print_help()
        return 0

    def fill(self, parser: argparse.ArgumentParser, bases: Sequence["DataclassInstance"] = ()) -> None:
        """Put all options into an argparse parser, by group: it writes help and completions."""
        lines = [f"momentum2 {self.command} {line}" for line in self.usage.splitlines()]
        parser.usage = "\n       ".join(lines).replace("%", "%%")
        parser.description, parser.epilog = (
            self.description.replace("%", "%%"),
            self.epilog.replace("%", "%%"),
        )
        changed = {type(base): base for base in bases}
        for part in (*self.options, *([self.settings] if self.settings else [])):
            _add(parser, changed.get(type(part), part))


def _add(parser: argparse.ArgumentParser, part: "DataclassInstance", section: str = "") -> None:
    told, known = _help_texts(type(part)), leaves(type(part))
    title = (
        f"{section}: {(part.__doc__ or '').splitlines()[0]}"
        if section
        else (part.__doc__ or "").splitlines()[0]
    )
    group = parser.add_argument_group(title.rstrip("."))
    inside = []
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value):
            inside.append(f.name)
            continue
        hint, text = known[f.name], told.get(f.name, "")
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        if value is not None and "(default" not in text:
            text += f" (default: {shown})"
        name = f"{section}.{f.name}" if section else f.name
        group.add_argument(f"--{name}", metavar=_metavar(hint), help=text.replace("%", "%%"))
    for name in inside:
        _add(parser, getattr(part, name), f"{section}.{name}" if section else name)


def _metavar(hint: Any) -> str:
    words = words_of(hint)
    return (
        f"{{{','.join(words)}}}"
        if words
        else _METAVARS.get(kind_of(hint).removesuffix(" or none"), "N,N,...")
    )


def _help_texts(kind: type) -> dict[str, str]:
    """The line of each field in a dataclass's docstring."""
    _, _, told = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", told, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
