"""From the words of a command line to an exit code: 0, 1 for an error of our own, 2 for a mistake in one sentence."""

import argparse
import errno
import io
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from momentum2 import __version__
from momentum2.cli.commands import COMMANDS
from momentum2.cli.options import Words, plain
from momentum2.errors import ProcessLost, SaidElsewhere, SettingError, UserError, hint, shown
from momentum2.terminal import show

_PATHS = ("TEXT", "RUN", "RUN IMAGE", "DATA", "DIR", "FEATURES")  # most texts are paths
#: Errors without a file's name that limits or devices of the machine are the cause of.
_LIMITS = {
    *(errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.EAGAIN, errno.ENOMEM),
    *(errno.EIO, errno.EBADF, errno.EPIPE, errno.ENXIO, errno.ENODEV, errno.EPERM),
}
_LONGEST = 2_000  # characters of a line, such as one that quotes what somebody wrote


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    with _listening():
        code = _run(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (
            OSError
        ):  # which was said, as far as it can be; Python's end would say it again and change the code
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if _others_wait():  # what python does at its end would wait for them
        os._exit(code)
    return code


class _Said(logging.Handler):
    """What the library says, on the terminal: words on stdout, warnings on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        warning = record.levelno >= logging.WARNING
        print(shown(record.getMessage(), _LONGEST), file=sys.stderr if warning else sys.stdout, flush=True)


@contextmanager
def _listening() -> Iterator[None]:
    """Inside, everything is said on the terminal; letters that it does not have are escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # of a stream that is a pipe and was opened to be read too
                stream.reconfigure(errors="backslashreplace")
    log, said = logging.getLogger("momentum2"), _Said()
    before = log.level
    log.addHandler(said)
    log.setLevel(logging.INFO)
    show()
    try:
        yield
    finally:
        log.removeHandler(said)
        log.setLevel(before)


def _run(arguments: list[str]) -> int:
    """Run a command, to the last line that it prints."""
    words: Words | None = None
    try:
        code = 0
        kinds = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")] if arguments else []
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            _print_help()
        elif arguments[0] in ("--version", "version"):
            print(f"momentum2 {__version__}")
        elif arguments[0].startswith("--print-completion"):
            print(_completion("=".join(arguments).partition("=")[2]))
        elif kinds and arguments[1:] in (["-h"], ["--help"]):
            _print_help(kinds)
        else:
            name, rest = _find(arguments)
            options = COMMANDS[name].options()
            words = options.parse(name, rest)
            if words.help:
                parser = _parser(name)
                options.fill(parser, COMMANDS[name].defaults(words))
                print(
                    parser.format_help(), end=""
                )  # argparse would print nothing to a full disk without a word
            else:
                for sentence in words.old:
                    _say(sentence, 0)
                code = COMMANDS[name].run(words)
        sys.stdout.flush()
        return code
    except SaidElsewhere:
        return 2
    except UserError as error:
        return _say(error.told("--") if isinstance(error, SettingError) else str(error), 2)
    except ProcessLost as error:  # nobody's mistake: torchrun may restart us
        return _say(str(error), 1)
    except KeyboardInterrupt:  # while there was nothing to save yet
        return 130
    except (BrokenPipeError, SystemExit):  # `head` has seen enough; rich ends the program then
        return 0
    except Exception as error:
        cause = _of_the_machine(error)
        return _say(cause, 2) if cause else _say(_unforeseen(error, words), 1)


def _say(sentence: str, code: int) -> int:
    if "RANK" not in os.environ or _is_first_to_say(sentence):
        with suppress(OSError):  # of a stream that nobody reads any more: the code still says it
            print(f"momentum2: {shown(sentence, _LONGEST)}", file=sys.stderr)
    return code


def _is_first_to_say(sentence: str) -> bool:
    from momentum2 import distributed

    return distributed.is_first_to_say(sentence)


def _of_the_machine(error: Exception) -> str | None:
    """The sentence for an error that files or memory are the cause of, wherever it came up; None for any other."""
    signs = ("can't allocate memory", "out of memory", "can't start new thread")
    cause: BaseException | None = error
    while (
        cause is not None and not isinstance(cause, MemoryError) and not any(s in str(cause) for s in signs)
    ):
        cause = cause.__cause__
    if cause is not None:
        return "There is not enough memory. Use a smaller batch, image size or network, or fewer workers."
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full. Free some space and run the same command again to resume."
    if error.filename is None:
        if error.errno == errno.ENOENT:  # what has no name is where we are
            return "The current folder no longer exists. Change to another one."
        if error.errno not in _LIMITS:
            return None
        return f"Something could not be read or written ({error.strerror}). Check the limits of this machine."
    path = shown(os.fsdecode(error.filename))
    return f"{path} cannot be used ({error.strerror}). Check the path and its permissions."


def _find(arguments: list[str]) -> tuple[str, list[str]]:
    """The command, which is one word or two, and what follows it."""
    for count in (2, 1):
        name = " ".join(arguments[:count])
        if name in COMMANDS:
            return name, arguments[count:]
    first, names = arguments[0], list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    if first in names:
        kinds = [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]
        given = f" {arguments[1]!r} is not one of them." if arguments[1:] else ""
        raise UserError(f"Choose what to {first}: {', '.join(kinds[:-1])} or {kinds[-1]}.{given}")
    if first.startswith("-"):
        raise UserError(f"Choose a command before {first}: {', '.join(names)}.")
    raise UserError(f"There is no command called {first!r}. {hint(first, names)}")


def _print_help(names: Sequence[str] = tuple(COMMANDS)) -> None:
    print("usage: momentum2 COMMAND ...\n\nPretrain vision backbones without labels.\n\ncommands:")
    for name in names:
        print(f"  {name:<15} {_summary(name)}")
    print("\nmomentum2 COMMAND --help shows every option of a command.")
    print("momentum2 --version prints the version; momentum2 --print-completion SHELL prints completions.")


def _summary(name: str) -> str:
    return COMMANDS[name].description.split(". ")[0].rstrip(".") + "."


def _parser(name: str) -> argparse.ArgumentParser:
    """A parser that writes the help of a command."""
    usage = "\n       ".join(f"momentum2 {name} {line}" for line in COMMANDS[name].usage.split("\n"))
    return argparse.ArgumentParser(usage=plain(usage.rstrip()), description=plain(COMMANDS[name].description))


def _completion(shell: str) -> str:
    """A script that teaches a shell the commands and their options."""
    try:
        import shtab
    except ModuleNotFoundError:
        raise UserError("Completions need their extra. Run pip install 'momentum2[completion]'.") from None
    if shell not in shtab.SUPPORTED_SHELLS:
        shells = "|".join(shtab.SUPPORTED_SHELLS)
        raise UserError(f"Choose a shell: momentum2 --print-completion {shells}.")
    parser = argparse.ArgumentParser("momentum2")
    groups = {"": parser.add_subparsers()}
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        if group not in groups:
            groups[group] = groups[""].add_parser(group, help=f"{group} ...").add_subparsers()
        leaf = groups[group].add_parser(word, help=plain(_summary(name)))
        command.options().fill(leaf)
        for action in leaf._actions:
            if not action.choices and action.metavar in _PATHS:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _unforeseen(error: Exception, words: Words | None) -> str:
    """Write the traceback to a file, in the run directory if there is one, and name it in a sentence."""
    places: list[str] = []
    if words:
        named = words.named if words.positional and words.positional.name == "RUN" else ()
        places = [str(place) for place in (words.options.get("out"), *named) if place]
    where = "above"
    for folder in (*filter(os.path.isdir, places), None):  # None is the temporary folder
        try:
            with tempfile.NamedTemporaryFile(
                "wb", dir=folder, prefix="momentum2-error-", suffix=".txt", delete=False
            ) as file:
                text = f"momentum2 {__version__}, Python {sys.version}\n{sys.argv}\n\n"
                text += "".join(traceback.format_exception(error))
                file.write(text.encode("utf-8", "backslashreplace"))
            where = f"in {file.name}"
            break
        except OSError:
            continue  # it may be what went wrong
    else:
        traceback.print_exception(error)
    lines = str(error).strip().splitlines()
    what = f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
    return f"Unexpected {what}. If your machine is not the cause, please report it with the details {where}."


def _others_wait() -> bool:
    """Whether other processes still work together with this one."""
    module = sys.modules.get("momentum2.distributed")
    return module is not None and module.world_size() > 1
