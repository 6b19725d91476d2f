"""Several processes: the same run as one, started and restarted by torchrun, on one machine and on two."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch

ROOT = Path(__file__).parents[2]
STEPS = 12


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", ROOT / "benchmarks" / "soak.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}", OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def options() -> Namespace:
    return Namespace(method="byol", workers=0, steps=STEPS, accumulate=1)


@pytest.fixture(scope="module")
def alone(
    soak: ModuleType, options: Namespace, tmp_path_factory: pytest.TempPathFactory, warm_python: str
) -> dict[str, Any]:
    """What two processes compute when nobody disturbs them."""
    out = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHON_EXEC", warm_python)  # what torchrun starts
        soak.run_several(soak.command(options, out, 0), out, soak.Killer(0), 2)
    return soak.numbers(out)


#: The command line, but the second process is killed once, in the seventh step: after a checkpoint.
KILLED = """
import os, signal, sys
from pathlib import Path
from momentum2.cli import main
from momentum2.methods.method import Method

def begin(method, k, begin=Method.before_step):
    killed = Path(__file__).with_name("killed")
    if k + 1 == 7 and os.environ["RANK"] == "1" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    begin(method, k)

Method.before_step = begin
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(KILLED)
    return tmp_path / "program.py"


@pytest.mark.slow
def test_torchrun_restarts_after_a_kill_and_the_run_ends_the_same(
    soak: ModuleType,
    options: Namespace,
    alone: dict[str, Any],
    program: Path,
    tmp_path: Path,
    environment: dict[str, str],
):
    """As it is anywhere: torchrun and its processes are fresh interpreters."""
    out = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "--max-restarts", "1", program, *soak.command(options, out, 0)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    assert soak.numbers(out) == alone


@pytest.mark.slow
def test_two_machines_go_on_after_one_has_lost_its_process(
    soak: ModuleType,
    options: Namespace,
    alone: dict[str, Any],
    program: Path,
    tmp_path: Path,
    environment: dict[str, str],
    warm_python: str,
):
    """Two torchruns on one machine: they know each other by network only."""
    out = tmp_path / "run"
    torchrun = [warm_python, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [*torchrun, "--max-restarts", "3", program, *soak.command(options, out, 0)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as first,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as second,
    ):
        codes = [agent.wait() for agent in (first, second)]
    assert codes == [0, 0], (tmp_path / "log").read_text()
    assert (tmp_path / "killed").exists()
    assert soak.numbers(out) == alone


SEVERAL = """
import argparse, os, shutil, socket, sys
from pathlib import Path
import soak

here = Path(sys.argv[1])
options = argparse.Namespace(method="byol", workers=0, steps=20, accumulate=1)

def processes(world, out, *more, before=lambda rank: None):
    '''Run the command in `world` processes that know each other; how each ended.'''
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ["WORLD_SIZE"] = str(world)
    children = []
    for rank in range(world):
        children.append(os.fork())
        if children[-1] == 0:
            log = os.open(f"{out}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            before(rank)
            os._exit(soak.momentum2_command([*soak.command(options, out, 0), *more]))
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
"""

ONE_AND_TWO = (
    SEVERAL
    + """
synced = ["--method.student_norm", "synced", "--method.teacher_norm", "synced", "--train.batch_size", "16"]
synced += ["--train.checkpoint_every", "10", "--optim.lr", "0.00001"]
assert processes(1, here / "one", *synced) == [0]
assert processes(2, here / "two", *synced) == [0, 0]
shutil.copytree(here / "two", here / "changed")
shutil.rmtree(here / "changed" / "checkpoints" / "step-00000020")
assert processes(1, here / "changed", *synced) == [0]
"""
)


def losses(out: Path) -> list[float]:
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def student(out: Path, step: int) -> torch.Tensor:
    """All weights of the student in one row."""
    tensors = safetensors.torch.load_file(out / "checkpoints" / f"step-{step:08d}" / "shared.safetensors")
    return torch.cat(
        [tensors[name].flatten() for name in sorted(tensors) if name.startswith("method/student")]
    )


@pytest.mark.slow
def test_one_process_and_two_are_the_same_run_and_may_change_on_the_way(
    tmp_path: Path, environment: dict[str, str], warm_python: str
):
    """A sum in another order now and then flips a ReLU, and a large learning rate would make more of that."""
    subprocess.run([warm_python, "-c", ONE_AND_TWO, tmp_path], env=environment, check=True, timeout=1800)
    one, two, changed = (losses(tmp_path / name) for name in ("one", "two", "changed"))
    assert len(one) == 20
    assert two == pytest.approx(one, abs=1e-4)
    assert changed == pytest.approx(one, abs=1e-4)
    assert changed[:10] == two[:10]
    assert changed[10:] != two[10:]  # it was really computed again, by one process
    learned = (student(tmp_path / "one", 20) - student(tmp_path / "one", 10)).norm()
    for name in ("two", "changed"):
        assert (student(tmp_path / name, 20) - student(tmp_path / "one", 20)).norm() < 0.2 * learned


NAN = (
    SEVERAL
    + """
import torch
from momentum2.methods import byol

def poison(rank):
    calls, distance = iter(range(1000)), byol.distance
    def poisoned(q, z):
        bad = rank == 1 and next(calls) >= 12  # two a step: the 7th step
        return distance(q, z) * (float("nan") if bad else 1.0)
    byol.distance = poisoned

print(*processes(2, here / "run", before=poison))
"""
)


@pytest.mark.slow
def test_a_nan_on_one_process_stops_all_within_the_step(
    tmp_path: Path, environment: dict[str, str], warm_python: str
):
    done = subprocess.run(
        [warm_python, "-c", NAN, tmp_path],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    assert done.stdout == "2 2\n"
    said = [(tmp_path / f"run-{rank}.log").read_text() for rank in range(2)]
    assert (
        said[0]
        .splitlines()[-1]
        .startswith(
            "momentum2: The loss or its gradient became NaN or infinite in step 7. The last checkpoint (step 4)"
        )
    )
    assert "NaN" not in said[1]  # said once
    assert "Traceback" not in said[0] + said[1]
    assert len(losses(tmp_path / "run")) == 6
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000004"]
