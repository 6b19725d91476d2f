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
