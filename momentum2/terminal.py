"""Whether a person watches. From Python nobody does, and everything is logged; the command line turns it on."""

import sys

_shown = False


def show() -> None:
    """Draw progress bars from now on, where there is a terminal."""
    global _shown
    _shown = True


def has_bars() -> bool:
    """Whether to draw progress bars."""
    return _shown and sys.stderr.isatty()
