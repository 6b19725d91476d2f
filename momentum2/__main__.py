"""`momentum2`, `python -m momentum2` and `torchrun -m momentum2`."""

import warnings


def main() -> int:
    """Run one command; returns the exit code."""
    # What Pillow thinks of a damaged file is not for the terminal: we say what becomes of it.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    try:
        from momentum2 import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
