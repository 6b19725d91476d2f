"""The command line: words to settings, settings to a function, what it raises to a sentence and an exit code."""

from momentum2.cli.main import main

__all__ = ["main"]
