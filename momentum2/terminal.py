"""Whether a person watches, and what is shown of work that takes its time.

From Python nobody watches, and everything is logged; the command line turns it on.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 10.0  # seconds between lines where there is no terminal
_shown = False


def show() -> None:
    """Draw progress bars from now on, where there is a terminal."""
    global _shown
    _shown = True


def has_bars() -> bool:
    """Whether to draw progress bars."""
    return _shown and sys.stderr.isatty()


def is_first() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress(what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """A function to call with the count of what is done: a bar on a terminal, elsewhere a line every ten seconds.

    Args:
        what: What is being done, such as "Decoding images".
        total: How much there is to do; None if nobody knows.
        unit: Of what.
    """
    if not is_first():
        yield lambda count: None
    elif has_bars():
        with _bar(what, total) as advance:
            yield advance
    else:
        yield _Lines(what, total, unit)


class _Lines:
    """Says how far the work is, at most every ten seconds; work that is done by then says nothing."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self.start = self.last = time.monotonic()

    def __call__(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last < _EVERY:
            return
        self.last = now
        of, left = "", ""
        if self.total:
            done = min(self.done, self.total)
            of = f" of {self.total:,}"
            left = f", {(now - self.start) * (self.total - done) / max(done, 1):,.0f} s left"
        shown = min(self.done, self.total) if self.total else self.done
        logging.getLogger("momentum2").info("%s: %s%s %s%s", self.what, f"{shown:,}", of, self.unit, left)


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda count: bars.advance(task, count)
