"""What an optimizer step asks of a GPU, counted on a machine without one.

    python benchmarks/gpu_cost.py [--backbone resnet50] [--size 224] [--images 32] [--cases ...] [--json FILE]

The real loop runs on the fake device of tests/gpu/fake.py: operations, kernels, bytes, waits of the host, copies and
what other processes send are counted, and nothing is computed. Kernels are calls weighted by a table, good for ratios
at best; what DistributedDataParallel adds is left out. docs/gpu.md says what of this was checked.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))

from counting import config, count
from fake import Count

from momentum2.config import MethodConfig

#: Method, processes, devices in one process (or None for one each), and the case that it is compared with.
CASES: dict[str, tuple[MethodConfig, int, int | None, str]] = {
    "plain": (MethodConfig(teacher_norm="local"), 1, None, "plain"),
    "momentum": (MethodConfig(), 1, None, "plain"),
    "8 devices, 1 process": (MethodConfig(), 1, 8, "plain"),
    "synced, 8 processes": (MethodConfig(student_norm="synced", teacher_norm="synced"), 8, None, "plain"),
    "moco, 8 processes": (MethodConfig("moco", teacher_norm="local"), 8, None, "moco, 8 processes"),
    "moco shuffle, 8 processes": (MethodConfig("moco", teacher_norm="shuffle"), 8, None, "moco, 8 processes"),
    "moco, 32 processes": (MethodConfig("moco", teacher_norm="local"), 32, None, "moco, 32 processes"),
    "moco shuffle, 32 processes": (
        MethodConfig("moco", teacher_norm="shuffle"),
        32,
        None,
        "moco, 32 processes",
    ),
}


def numbers(found: Count) -> dict[str, object]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(found).items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=32, help="of each process")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{options.backbone}, {options.size} px, {options.images} images a process, bf16; a step, or as it says"
    )
    print(
        f"{'case':<28}{'waits':>6}{'logged':>7}{'saved':>6}{'pageable':>9}{'pinned':>7}"
        f"{'calls':>14}{'kernels':>14}{'GB':>13}{'collectives':>12}{'received MB':>12}"
    )
    rows, usual = {}, {}
    for name in options.cases:
        method, world, devices, base = CASES[name]
        settings = config(
            method,
            options.size,
            options.images,
            world,
            {"devices": devices or world},
            backbone=options.backbone,
            projector_hidden=4096,
            projector_out=256,
        )
        with tempfile.TemporaryDirectory() as folder:
            found = count(settings, Path(folder), world)
        x = usual[name] = found.usual
        rows[name] = {kind: numbers(getattr(found, kind)) for kind in ("usual", "logged", "saved")}

        def against(field: str, x: Count = x, base: str = base) -> str:
            return f"{getattr(x, field) / getattr(usual[base], field):.2f}×" if base in usual else "–"

        print(
            f"{name:<28}{sum(x.waits.values()):>6}{sum(found.logged.waits.values()):>7}"
            f"{sum(found.saved.waits.values()):>6}{sum(x.pageable.values()):>9}{x.pinned:>7}"
            f"{x.calls:>7,}{against('calls'):>7}{x.kernels:>7,}{against('kernels'):>7}"
            f"{x.bytes / 1e9:>6.1f}{against('bytes'):>7}{x.collectives:>12}{x.received / 1e6:>12.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
