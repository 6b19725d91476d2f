"""Where a person watches. From Python nobody does, and all is said through logging; the command line says otherwise."""

import sys

_shown = False


def show() -> None:
    """Draw progress bars from now on, where there is a terminal."""
    global _shown
    _shown = True


def has_bars() -> bool:
    """Whether progress bars are to be drawn."""
    return _shown and sys.stderr.isatty()
