"""`momentum2`, `python -m momentum2` and `torchrun -m momentum2`."""


def main() -> int:
    """Run one command; returns the exit code."""
    try:
        from momentum2 import cli

        return cli.main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
