"""Real processes that agree: on files, errors, signals and losses of each other."""

import os
import re
import socket
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

WORLD = 2

IMPORTS = """
import os, signal, sys
from pathlib import Path
import torch
from momentum2 import distributed
from momentum2.config import Config, TrainConfig
from momentum2.runs.checkpoint import Checkpoints
from momentum2.runs.directory import open_run
from momentum2.training.signals import StopSignal
from momentum2.distributed.together import lost_process
from momentum2.errors import ProcessLost, SaidElsewhere, UserError
"""

FORK = """
here, code, world = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
children = []
for rank in range(world):
    children.append(os.fork())
    if children[-1] == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(here / f"{name}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ["RANK"] = str(rank)
        distributed.setup(torch.device("cpu"))
        exec(code)
        distributed.teardown()
        sys.exit()
print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


class Ended(NamedTuple):
    """How a process ended and what it said."""

    code: int
    out: str
    err: str


def on_processes(python: str, code: str, here: Path, world: int = WORLD) -> list[Ended]:
    """Run `code` in `world` processes that know each other (forks of one, which has imported already)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rendezvous = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [python, "-c", IMPORTS + FORK, str(here), textwrap.dedent(code), str(world)],
        env=dict(os.environ, OMP_NUM_THREADS="1", **rendezvous),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    return [
        Ended(int(ended), (here / f"out{rank}").read_text(), (here / f"err{rank}").read_text())
        for rank, ended in enumerate(done.stdout.split())
    ]


@pytest.mark.slow
def test_the_rows_of_all_devices_reach_every_process_and_all_fall_back_together(
    tmp_path: Path, warm_python: str
):
    code = """
    checkpoints = Checkpoints(here / str(rank) / "checkpoints", 2, "")  # no shared file system
    for step in (1, 2):
        own = {"mean": torch.tensor([step + rank / 4])}
        checkpoints.save(step, {"w": torch.full((3,), 10.0 * step)}, own, {})
    found = checkpoints.load()
    print(found.step, found.shared["w"].tolist(), found.devices["mean"].tolist())
    if rank == 0:
        path = checkpoints.directory / "step-00000002" / "devices.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    found = checkpoints.load()
    print(found.step, found.shared["w"].tolist(), found.devices["mean"].tolist())
    """
    first, second = on_processes(warm_python, code, tmp_path)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out.splitlines() == ["2 [20.0, 20.0, 20.0] [2.0, 2.25]", "1 [10.0, 10.0, 10.0] [1.0, 1.25]"]
    assert second.out == first.out
    assert "step-00000002 is corrupt" in first.err
    assert not (tmp_path / "1").exists()  # only process 0 writes


@pytest.mark.slow
def test_an_error_of_one_is_the_error_of_all_and_said_once(tmp_path: Path, warm_python: str):
    code = """
    def tried(name, work):
        try:
            work()
        except UserError as error:
            print(name, type(error).__name__, error)

    def with_other_seed():
        with open_run(here / "a", Config(train=TrainConfig(seed=rank)), "auto"):
            pass

    def on_another_machine():  # process 1 sees the run, process 0 does not
        place = here / f"disk{rank}"
        if rank == 1:
            place.mkdir()
            (place / "config.yaml").touch()
        with open_run(place, Config(), "auto"):
            pass

    def not_writable():
        (here / "file").touch()
        with open_run(here / "file", Config(), "auto"):
            pass

    def nothing_to_resume():
        with open_run(here / "new", Config(), "must"):
            pass

    def not_finite():
        value = torch.tensor(float("nan") if rank == 1 else 1.0)
        StopSignal(Checkpoints(here / "none", 1, ""), torch.device("cpu")).check(value, 3)

    def not_saved():
        own = {"m": torch.tensor([float("inf") if rank == 1 else 0.0])}
        Checkpoints(here / "x", 1, "").save(1, {}, own, {})

    works = with_other_seed, on_another_machine, not_writable, nothing_to_resume, not_finite, not_saved
    for work in works:
        tried(work.__name__, work)
    """
    processes = on_processes(warm_python, code, tmp_path)
    assert [p.code for p in processes] == [0, 0], processes[0].err + processes[1].err
    said = [{line.split()[0]: line.split(maxsplit=2)[1:] for line in p.out.splitlines()} for p in processes]
    expected = {
        "with_other_seed": (1, "UserError", "different settings"),
        "on_another_machine": (0, "UserError", "exists on another machine"),
        "not_writable": (0, "UserError", "cannot be written to"),
        "nothing_to_resume": (0, "SettingError", "resume is must"),
        "not_finite": (0, "UserError", "NaN or infinite in step 4"),
        "not_saved": (1, "UserError", "m is not finite after step 1"),
    }
    assert said[0].keys() == said[1].keys() == expected.keys()
    for name, (speaker, raised, words) in expected.items():
        for rank in range(WORLD):
            kind, sentence = said[rank][name]
            assert kind == (raised if rank == speaker else "SaidElsewhere"), name
            assert words in sentence


@pytest.mark.slow
def test_a_signal_to_one_stops_all_at_the_same_step_and_a_dead_one_is_named(tmp_path: Path, warm_python: str):
    code = """
    checkpoints = Checkpoints(here / "none", 1, "")
    with StopSignal(checkpoints, torch.device("cpu")) as stop:
        for step in range(10):
            if rank == 1 and step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.check(torch.tensor(1.0), step):
                print("stopped at", step, flush=True)
                break
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with lost_process():
            checkpoints.save(1, {}, {"m": torch.ones(1)}, {})
    except ProcessLost as error:
        print(error)
    """
    first, second = on_processes(warm_python, code, tmp_path)
    assert second.out == "stopped at 4\n"
    assert second.code == -9
    assert first.out.splitlines()[0] == "stopped at 4"
    assert re.fullmatch(
        r"Another process of this run died \(.*\)\. Run the same command again to resume\.",
        first.out.splitlines()[1],
    )
    assert first.code == 0, first.err


NOBODY = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from momentum2 import distributed
from momentum2.errors import ProcessLost

distributed._JOINING = timedelta(seconds=0.3)
if sys.argv[1] == "torchrun's":  # which is there although no other process is
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
try:
    distributed.setup(torch.device("cpu"))
except ProcessLost as error:
    print(error)
"""


@pytest.mark.parametrize("store", ["its own", "torchrun's"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_to_whom_nobody_comes_says_so(warm_python: str, rank: int, store: str):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [warm_python, "-c", NOBODY, store],
        env=dict(os.environ, OMP_NUM_THREADS="1", **place),
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"Not all processes of this run started within .* \(.*\)\. Run .*\.\n", done.stdout)


ALONE = """
import os, sys
from momentum2 import distributed
from momentum2.cli import main
from momentum2.training import loop as train
from momentum2.errors import UserError

kind = sys.argv[2]
if kind == "nccl":  # after an error its group stays, for its teardown would wait for the others
    distributed.abandon = lambda: None

def fails(*rest):
    raise UserError("This process has no room.") if sys.argv[3] == "expected" else ValueError("a mistake")

if os.environ["RANK"] == "1":
    train.build_optimizer = fails
size = ["--train.steps=50", "--train.batch_size=8", "--model.width=0.125", "--model.projector_hidden=32"]
data = ["--data.train_size=64", "--monitor.knn_every=0", "--monitor.report=false", "--train.device=cpu"]
code = main(["pretrain", "quickstart", "--out", sys.argv[1], *size, *data])
print("went on", flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [("expected", 2, "momentum2: This process has no room."), ("unexpected", 1, "ValueError: a mistake")],
)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_error_of_one_process_alone_is_said_and_ends_all(
    tmp_path: Path, warm_python: str, backend: str, error: str, code: int, says: str
):
    program = tmp_path / "program.py"
    program.write_text(ALONE)
    logs = tmp_path / "logs"
    torchrun = [warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--log-dir", logs, "--redirects", "3", program, tmp_path / "run", backend, error],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 1
    (said,) = logs.glob("*/attempt_0/1/stderr.log")
    assert says in said.read_text()
    assert re.search(rf"exitcode *: {code} ", done.stderr)
    details = [file.read_text() for file in (tmp_path / "run").glob("momentum2-error-*.txt")]
    assert [("in fails" in text) for text in details] == [True] * (error == "unexpected")
    if details:
        assert "Traceback" not in said.read_text()
    if backend == "nccl":
        assert "went on" not in (said.parent / "stdout.log").read_text()


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("--train.stepz=5", "Unknown option --train.stepz"),  # found before the processes have joined
        ("--data.root=/nowhere/at/all", "/nowhere/at/all"),  # and after
    ],
)
def test_a_mistake_that_all_processes_find_is_said_once(
    tmp_path: Path, warm_python: str, mistake: str, says: str
):
    torchrun = [warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["pretrain", "quickstart", "--data.name=folder", "--train.device=cpu", mistake]
    done = subprocess.run(
        [*torchrun, "-m", "momentum2", *command, "--out", tmp_path / "run"],
        env=dict(os.environ, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("momentum2: ") and says in line][
        1:
    ] == []
    assert done.stderr.count("momentum2: ") == 1, done.stderr
    assert not (tmp_path / "run" / "config.yaml").exists()
