"""The exceptions that a person is meant to read."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Self


class UserError(Exception):
    """An expected mistake. The message says what is wrong and what to do.

    The command line prints only the message and exits with code 2; library callers can catch it.
    """


class SettingError(UserError):
    """A mistake in one setting.

    Args:
        setting: Its dotted name, such as `train.epochs`.
        problem: The rest of the sentence: `must be at least 1, not 0.`
        source: The file with the mistake, if there is one.
    """

    def __init__(self, setting: str, problem: str, source: Path | None = None) -> None:
        super().__init__(setting, problem, source)
        self.setting, self.problem, self.source = setting, problem, source

    def __str__(self) -> str:
        return self.told("")

    def told(self, prefix: str) -> str:
        """The sentence; the command line calls a setting `--train.epochs`, with the prefix `--`."""
        return self._sentence(prefix) if self.source is None else f"{self.source}: {self._sentence('')}"

    def in_file(self, source: Path) -> Self:
        """The same mistake, made in a file."""
        return type(self)(self.setting, self.problem, source)

    def _sentence(self, prefix: str) -> str:
        return f"{prefix}{self.setting} {self.problem}"


class UnknownSetting(SettingError):
    """A name that no setting has; `problem` is the name that may be meant, or empty."""

    def _sentence(self, prefix: str) -> str:
        hint = f" Did you mean {prefix}{self.problem}?" if self.problem else ""
        return f"Unknown {'option' if prefix else 'setting'} {prefix}{self.setting}.{hint}"


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, settings have other names: with `{"data.": "eval_data."}` a mistake in data.x is one in eval_data.x."""
    try:
        yield
    except SettingError as error:
        for old, new in names.items():
            if error.setting.startswith(old):
                name = new + error.setting.removeprefix(old)
                raise type(error)(name, error.problem, error.source) from None
        raise


class SaidElsewhere(UserError):
    """A `UserError` that several processes raise and another one of them prints."""


class Stopped(Exception):
    """A signal ended the work; everything is saved, and the same call resumes it."""


class ProcessLost(Exception):
    """Another process of the run has died. The command line prints the message and exits with code 1."""


def shown(text: object, most: int = 200) -> str:
    """Text from elsewhere, such as a file's name, as a person may be shown it: on one line, no control characters.

    A terminal obeys what it prints; a name with a newline would be a line that we seem to have said.
    """
    whole = _cut(str(text), most)
    if whole.isprintable():
        return whole
    escaped = (c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in whole)
    return _cut("".join(escaped), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"


def reason(error: BaseException) -> str:
    """What an exception from somebody else's code says, on one line: its kind and its words."""
    return shown(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: "), 300)


def hint(word: str, known: Iterable[str]) -> str:
    """What a person may have meant by a word that is not known: `Did you mean plan?`, or all that are."""
    names = list(known)
    close = get_close_matches(word[:100], names, n=1)
    return f"Did you mean {close[0]}?" if close else f"Choose from {', '.join(names)}."
