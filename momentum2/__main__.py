"""`python -m momentum2` and `torchrun -m momentum2`."""

from momentum2.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
