"""Words of the command line to typed settings, and every option to a line of help.

All options are fields of dataclasses, `--field` or `--section.field`; these say what they take and within which limits.
What was given is known by its name, whether a flag gave it or a file. argparse writes the help and the completions.
"""

import argparse
import inspect
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from momentum2.errors import SettingError, UnknownSetting, UserError
from momentum2.settings import (
    BOOLEANS,
    close_setting,
    is_whole,
    kind_of,
    leaves,
    override,
    takes_none,
    words_of,
)
from momentum2.spelling import OLD_OPTIONS, old_words
from momentum2.yaml_settings import read_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

_METAVARS = {"true or false": "true|false", "a whole number": "N", "a number": "X", "text": "TEXT"}


@dataclass(frozen=True)
class ConfigFile:
    """Settings from a file.

    Args:
        config: YAML file of settings, such as a run's config.yaml. Flags win over files, later files over earlier.
    """

    config: str | None = None


@dataclass(frozen=True)
class Positional:
    """What a command is about: the words that are not options.

    Args:
        name: What the usage calls it, such as RUN.
        help: What it is.
        choices: The words that it may be, if they are known.
    """

    name: str
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Words:
    """What somebody typed after a command.

    Args:
        command: The command.
        positional: What it is about, if anything.
        named: The words that are not options.
        options: Given options of the command itself, by name.
        settings: Given settings by name, from files and flags; a flag wins over a file.
        files: The file of each setting that no flag gave.
        help: Whether help was asked for.
        old: A sentence for each option that is spelled differently today.
        after: The switch that a word follows, which may be meant as its value.
    """

    command: str
    positional: Positional | None
    named: tuple[str, ...]
    options: dict[str, object]
    settings: dict[str, object]
    files: dict[str, Path]
    help: bool
    old: tuple[str, ...] = ()
    after: Mapping[str, str] = field(default_factory=dict)

    def read(self, base: S) -> S:
        """The command's own options that are fields of `base`; what was not given is as in `base`."""
        known = leaves(type(base))
        return override(base, {name: value for name, value in self.options.items() if name in known})

    def override(self, base: S) -> S:
        """`base` with the given settings."""
        with self.naming_files():
            return override(base, self.settings)

    @property
    def copied(self) -> set[str]:
        """The settings from files that are whole configs, such as a run's config.yaml: nobody chose each of them."""
        by_file = defaultdict[Path, set[str]](set)
        for name, file in self.files.items():
            by_file[file].add(name)
        return {name for names in by_file.values() if is_whole(names) for name in names}

    @contextmanager
    def naming_files(self) -> Iterator[None]:
        """Inside, a mistake in a setting that a file gave is one of that file."""
        try:
            yield
        except SettingError as error:
            file = self.files.get(error.setting)
            if file is None:
                raise
            raise error.in_file(file) from None

    def one(self) -> str:
        """The word that the command is about."""
        self.some()
        return self.at_most_one() or ""

    def some(self) -> tuple[str, ...]:
        """The words that the command is about, at least one."""
        if not self.named and self.positional:
            choices = self.positional.choices
            hint = (
                f"Choose one of {', '.join(choices)}." if choices else f"See momentum2 {self.command} --help."
            )
            raise UserError(f"Missing argument {self.positional.name}. {hint}")
        return self.named

    def at_most_one(self) -> str | None:
        """The word that the command is about, if there is one."""
        allowed = 1 if self.positional else 0
        if len(self.named) > allowed:
            word = next((word for word in self.named if word in self.after), self.named[allowed])
            if word in self.after:
                raise SettingError(self.after[word], f"takes true or false, not {word!r}.")
            raise UserError(f"Unexpected argument {word!r}. See momentum2 {self.command} --help.")
        return self.named[0] if self.named else None


@dataclass(frozen=True)
class Options:
    """What may follow a command.

    Args:
        positional: What it is about.
        options: Its own options: dataclasses with their defaults.
        settings: The settings that it takes; where names are the same, its own options win.
    """

    positional: Positional | None = None
    options: Sequence["DataclassInstance"] = ()
    settings: "DataclassInstance | None" = None

    @property
    def own(self) -> dict[str, Any]:
        """The type of each of its own options."""
        return {name: hint for part in self.options for name, hint in leaves(type(part)).items()}

    @property
    def known(self) -> dict[str, Any]:
        """The type of each option."""
        return (leaves(type(self.settings)) if self.settings else {}) | self.own

    def parse(self, command: str, arguments: Sequence[str]) -> Words:
        """Tell options from other words, in any order; a `UserError` for an option that `command` does not have."""
        words, own = deque(arguments), self.own
        named, files, help_wanted = list[str](), list[Path](), False
        after = dict[str, str]()  # words that follow a switch, which may be meant as its value
        options, settings, old = dict[str, object](), dict[str, object](), list[str]()
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
                name, value = self._option(word, words, old)
                (options if name in own else settings)[name] = value
                if self.known.get(name) is bool and value == "true" and words:
                    after[words[0]] = name
                if name == "config" and value is not None:
                    files.append(Path(value))
        in_files, origin = dict[str, object](), dict[str, Path]()
        for file in files:
            found = read_settings(file)
            in_files |= found
            origin |= {name: file for name in found if name not in settings}
        settings = in_files | settings
        old += old_words(settings)
        return Words(
            command, self.positional, tuple(named), options, settings, origin, help_wanted, tuple(old), after
        )

    def _option(self, word: str, rest: deque[str], old: list[str]) -> tuple[str, str | None]:
        """Name and value of an option, whose value may be the next word; None for the word none, where that is one."""
        name, has_value, value = word.removeprefix("-").removeprefix("-").partition("=")
        name, known = name.replace("-", "_"), self.known
        name += "_" if iskeyword(name) else ""  # no field can be called `in`; it is `in_`
        if name not in known and OLD_OPTIONS.get(name) in known:
            old.append(f"--{name} is now --{OLD_OPTIONS[name]}.")
            name = OLD_OPTIONS[name]
        hint = known.get(name)
        # A name with a section may be one of an older version, which the settings know; objects are given by Python.
        recorded = name.startswith("objects.")
        if not word.startswith("--") or recorded or (hint is None and not (self.settings and "." in name)):
            raise UnknownSetting(name, close_setting(name, known))
        if not has_value:
            if hint is bool:  # `--probe` alone is true
                value = rest.popleft() if rest and rest[0].lower() in BOOLEANS else "true"
            elif rest and not rest[0].startswith("--"):  # but -1 and -20% are values
                value = rest.popleft()
            else:
                raise SettingError(name, f"needs a value: {kind_of(hint)}." if hint else "needs a value.")
        nothing = hint is not None and value.lower() in ("none", "null") and takes_none(hint)
        return name, None if nothing else value

    def fill(self, parser: argparse.ArgumentParser, defaults: "DataclassInstance | None" = None) -> None:
        """Put all options into an argparse parser, by group; `defaults` are shown instead of those of `settings`."""
        if self.positional:
            choices = self.positional.choices
            text = self.positional.help + (f" One of {', '.join(choices)}." if choices else "")
            parser.add_argument(
                "named", metavar=self.positional.name, nargs="*", help=plain(text), choices=choices or None
            )
        for part in self.options:
            _add_group(parser, part)
        if self.settings:
            _add_group(parser, defaults or self.settings)


def _add_group(parser: argparse.ArgumentParser, part: "DataclassInstance", section: str = "") -> None:
    """A group of the fields of a dataclass, and one for each of its sections."""
    headline = (part.__doc__ or "").splitlines()[0].rstrip(".")
    group = parser.add_argument_group(f"{section}: {headline}" if section else headline)
    texts, hints = _help_texts(type(part)), leaves(type(part))
    sections = []
    for each in fields(part):
        name, value = f"{section}.{each.name}" if section else each.name, getattr(part, each.name)
        if is_dataclass(value) and not isinstance(value, type):
            sections += [(name, value)] if name != "objects" else []  # a record, not something to set
            continue
        text = texts.get(each.name, "")
        if value is not None and "(default" not in text:
            text += f" (default: {str(value).lower() if isinstance(value, bool) else value})"
        hint = hints[each.name]
        group.add_argument(
            f"--{name.rstrip('_')}", metavar=_metavar(hint), help=plain(text), choices=words_of(hint) or None
        )
    for name, inside in sections:
        _add_group(parser, inside, name)


def _metavar(hint: Any) -> str:
    words, kind = words_of(hint), kind_of(hint).removesuffix(" or none")
    if words:
        number = "|N" if "whole number" in kind else "|X" if "number" in kind else ""
        return ("{" + ",".join(words) + "}" if len(words) > 1 else words[0]) + number
    return _METAVARS.get(kind, "NAME=VALUE,..." if kind.startswith("words") else "N,N,...")


def plain(text: str) -> str:
    """Text for argparse, which would fill in its percent signs."""
    return text.replace("%", "%%")


def _help_texts(kind: type) -> dict[str, str]:
    """The line of each field in the docstring of a dataclass."""
    _, _, told = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", told, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
