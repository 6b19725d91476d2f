"""Four devices on one, two and four processes, and on a changing number: the same run, which is the oracle's."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from cases import DEVICES, Case
from processes_program import CASES, ORACLES, STEPS
from torch import Tensor

import momentum2

pytestmark = pytest.mark.slow

CHANGED = "four, one, two"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """Directories `1`, `2` and `4`, of so many processes, and one of runs that four began, one took over, two ended."""
    root = tmp_path_factory.mktemp("runs")
    start(warm_python, 4, root / "4")
    keep_until(ORACLES, root / "4", root / CHANGED)
    start(warm_python, 1, root / "1", root / CHANGED)
    keep_until(14, root / CHANGED, root / CHANGED)
    start(warm_python, 2, root / "2", root / CHANGED)
    return root


def start(python: str, world: int, *directories: Path) -> None:
    """Run all cases in each of the directories, on `world` processes."""
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*torchrun, Path(__file__).with_name("processes_program.py"), *directories],
        env=dict(os.environ, PYTHONPATH=str(Path(momentum2.__file__).parents[1]), OMP_NUM_THREADS="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr


def keep_until(step: int, source: Path, target: Path) -> None:
    """What a run that was stopped after `step` steps would have left."""
    if source != target:
        shutil.copytree(source, target)
    for run in target.iterdir():
        (run / "encoder.safetensors").unlink()
        for checkpoint in (run / "checkpoints").iterdir():
            if int(checkpoint.name.removeprefix("step-")) > step:
                shutil.rmtree(checkpoint)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def saved(run: Path, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """What is one for all devices, what each device has, and the number of processes that wrote it."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    shared, devices = (
        safetensors.torch.load_file(checkpoint / f"{name}.safetensors") for name in ("shared", "devices")
    )
    return shared, devices, json.loads((checkpoint / "state.json").read_text())["world"]


def differences(ours: dict[str, Tensor], right: dict[str, Tensor]) -> Iterator[str]:
    if ours.keys() != right.keys():
        yield f"has {ours.keys() ^ right.keys()} too many or too few"
    for name in ours.keys() & right.keys():
        error, scale = (ours[name] - right[name]).abs().max(), right[name].abs().max()
        if not error <= 1e-7 * scale:
            yield f"{name} is off by {error / scale:.1e}"


def differing_losses(ours: list[float], right: list[float]) -> Iterator[str]:
    for k, (loss, expected) in enumerate(zip(ours, right, strict=True)):
        if loss != pytest.approx(expected, rel=1e-7, abs=1e-7):
            yield f"the loss of step {k + 1} is {loss}, not {expected}"


def compared_with_one_process(run: Path, one: Path, world: int) -> Iterator[str]:
    """All steps, and all that is saved after the last."""
    yield from differing_losses(losses(run), losses(one))
    (shared, devices, wrote), (right_shared, right_devices, alone) = (saved(r, STEPS) for r in (run, one))
    assert (wrote, alone) == (world, 1)
    yield from differences(shared, right_shared)
    yield from differences(devices, right_devices)


def compared_with_the_oracle(run: Path, case: Case) -> Iterator[str]:
    """Up to the first checkpoint, on the views of the run itself."""
    assert len(losses(run)) == STEPS
    right = torch.load(run / "oracle.pt")
    yield from differing_losses(losses(run)[:ORACLES], right["losses"])
    shared, devices, _ = saved(run, ORACLES)
    assert bool(devices) == (case.has_teacher and case.teacher == "momentum")
    assert all(len(tensor) == DEVICES for tensor in devices.values())
    yield from differences({name: shared[name] for name in right["weights"]}, right["weights"])
    yield from differences(devices, right["histories"])


def test_processes_decide_nothing(runs: Path):
    """One test of all cases: several tests might each have the runs made anew, in workers of their own."""
    wrong = {}
    for case in CASES:
        one = runs / "1" / str(case)
        wrong[f"{case} on 1"] = list(compared_with_the_oracle(one, case))
        for several, world in (("2", 2), ("4", 4), (CHANGED, 2)):
            wrong[f"{case} on {several}"] = list(
                compared_with_one_process(runs / several / str(case), one, world)
            )
    report = [f"{what}: {found[0]} (differences: {len(found)})" for what, found in wrong.items() if found]
    assert not report, "\n".join(report)
