"""`momentum2`, `python -m momentum2` and `torchrun -m momentum2`."""

import os
import sys
import warnings


def main() -> int:
    """Run one command; returns the exit code."""
    # Whoever started us may have closed these. Before the next file that is opened gets their numbers, and with them
    # what libraries print.
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
    # What libraries think of a damaged file is not for the terminal: we say what becomes of it.
    warnings.filterwarnings("ignore")
    try:
        from momentum2 import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
