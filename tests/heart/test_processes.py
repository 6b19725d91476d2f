"""Four devices on one, two and four processes, and on a changing number: the same run, which is the oracle's."""

import json
import os
import shutil
import subprocess
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


def close(ours: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert ours.keys() == right.keys()
    for name, tensor in right.items():
        error, scale = (ours[name] - tensor).abs().max(), tensor.abs().max()
        assert error <= 1e-7 * scale, f"{name}: off by {error / scale:.1e}"


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("several", ["2", "4", CHANGED])
def test_processes_decide_nothing(runs: Path, case: Case, several: str):
    one, run = runs / "1" / str(case), runs / several / str(case)
    assert len(losses(one)) == STEPS
    assert losses(run) == pytest.approx(losses(one), rel=1e-7, abs=1e-7)
    (shared, devices, wrote), (right_shared, right_devices, alone) = (saved(r, STEPS) for r in (run, one))
    assert (wrote, alone) == (2 if several == CHANGED else int(several), 1)
    close(shared, right_shared)
    close(devices, right_devices)
    assert bool(devices) == (case.has_teacher and case.teacher == "momentum")
    assert all(len(tensor) == DEVICES for tensor in devices.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_is_the_oracle(runs: Path, case: Case):
    """Up to the first checkpoint, on the views of the run itself."""
    run = runs / "1" / str(case)
    right = torch.load(run / "oracle.pt")
    assert len(right["losses"]) == ORACLES
    assert losses(run)[:ORACLES] == pytest.approx(right["losses"], rel=1e-7, abs=1e-7)
    shared, devices, _ = saved(run, ORACLES)
    close({name: shared[name] for name in right["weights"]}, right["weights"])
    close(devices, right["histories"])
