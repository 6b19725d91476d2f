"""A polite stop, and at once when asked twice."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from momentum2.errors import UserError
from momentum2.runs.checkpoint import Checkpoints
from momentum2.training.signals import StopSignal

CPU = torch.device("cpu")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, 2, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_remembered(number: int, checkpoints: Checkpoints, capfd):
    before = signal.getsignal(number)
    with StopSignal(checkpoints, CPU) as stop:
        assert not stop.check(torch.tensor(1.0), 0)
        os.kill(os.getpid(), number)
        assert stop.check(torch.tensor(1.0), 1)
        assert stop.check(torch.tensor(1.0), 2)
    assert signal.getsignal(number) is before
    assert (
        capfd.readouterr().err
        == "momentum2: Saving after this step. Send the signal again to stop immediately.\n"
    )


TWICE = """
import os, signal
from types import SimpleNamespace
from momentum2.training import signals
now = 100.0
signals.time = SimpleNamespace(monotonic=lambda: now)
with signals.StopSignal(None, None):
    os.kill(os.getpid(), signal.SIGTERM)
    now += signals.SAME_SIGNAL_SECONDS
    os.kill(os.getpid(), signal.SIGTERM)  # the launcher passes on what the scheduler sent too
    print("still here", flush=True)
    now += 0.1
    os.kill(os.getpid(), signal.SIGINT)
    print("not reached", flush=True)
"""


def test_a_second_signal_stops_at_once(warm_python: str):
    done = subprocess.run(
        [warm_python, "-c", TWICE], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == "still here\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stops_and_names_the_last_checkpoint(value: float, checkpoints: Checkpoints):
    with StopSignal(checkpoints, CPU) as stop:
        with pytest.raises(UserError, match=r"in step 8\. There is no checkpoint yet"):
            stop.check(torch.tensor(value), 7)
        checkpoints.save(5, {"w": torch.ones(1)}, {}, {})
        with pytest.raises(UserError, match=r"in step 8\. The last checkpoint .step 5. is usable"):
            stop.check(torch.tensor(value), 7)


def test_on_cuda_the_answer_comes_a_step_late_and_before_anything_is_saved(checkpoints: Checkpoints):
    """The device is CUDA by name alone; lateness does not depend on where the flags are."""
    with StopSignal(checkpoints, torch.device("cuda")) as stop:
        assert not stop.settle(4)  # a run that goes on from step 5
        assert not stop.check(torch.tensor(1.0), 5)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.check(torch.tensor(1.0), 6)
        assert stop.settle(6)
        assert stop.check(torch.tensor(float("nan")), 7)
        with pytest.raises(UserError, match="in step 8"):
            stop.settle(7)
        with pytest.raises(UserError, match="in step 8"):
            stop.check(torch.tensor(1.0), 8)


LATE = """
import sys
from pathlib import Path
import torch
from momentum2 import distributed
from momentum2.distributed.together import joined
from momentum2.errors import UserError
from momentum2.runs.checkpoint import Checkpoints
from momentum2.training.signals import StopSignal

with joined(torch.device("cpu")):
    rank, said = distributed.rank(), []
    with StopSignal(Checkpoints(Path(sys.argv[1]), 1, ""), torch.device("cuda")) as stop:
        for k in range(8):
            if k == 3 and rank == 1:
                stop._received = 0.0
            try:
                said.append(stop.check(torch.tensor(float("nan") if k == 5 and rank == 1 else 1.0), k))
            except UserError as error:
                said.append(str(error).split(". ")[0])
                break
    Path(sys.argv[1], f"said-{rank}").write_text(repr(said))
"""


def test_late_answers_reach_all_processes_in_the_same_step(tmp_path: Path, warm_python: str):
    program = tmp_path / "program.py"
    program.write_text(LATE)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([warm_python, *torchrun, program, tmp_path], check=True, timeout=600, capture_output=True)
    told = "The loss or its gradient became NaN or infinite in step 6"
    assert {(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)} == {
        repr([False, False, False, False, True, True, told])
    }
