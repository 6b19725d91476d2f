"""Runs that are really killed, stopped and starved, and go on as if nothing had happened."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from momentum2.api import pretrain
from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    TrainConfig,
)
from momentum2.data import cache
from momentum2.errors import UserError
from momentum2.methods import BYOL, METHODS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENVIRONMENT = dict(os.environ, PYTHONPATH=f"{BENCHMARKS.parent}{os.pathsep}{BENCHMARKS}", OMP_NUM_THREADS="1")


def run(python: str, *command: str | Path) -> str:
    """Run a Python program that must succeed; what it said."""
    words = [python, *map(str, command)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["10"], ["3", "--method", "moco", "--accumulate", "2", "--steps", "12", "--no-control"]],
    ids=["10 kills in 40 steps", "queue and accumulation"],
)
def test_a_killed_run_ends_as_if_left_alone(options: list[str], warm_python: str):
    said = run(warm_python, BENCHMARKS / "soak.py", *options)
    assert "equal to the last bit" in said
    assert int(re.search(r"^kills +(\d+)", said, re.MULTILINE)[1]) == int(options[0])


STOPPED = """
import argparse, os, signal, sys, time
from pathlib import Path
import soak
from momentum2.methods.method import Method

here = Path(sys.argv[1])
options = argparse.Namespace(method="byol", workers=0, steps=10, accumulate=1)

def code(out, in_step=None, happens=None):
    '''The exit code of a run in a fork; in a step something may happen to it.'''
    process = os.fork()
    if process == 0:
        log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        def begin(method, k, begin=Method.before_step):
            if k + 1 == in_step:
                happens()
            begin(method, k)
        Method.before_step = begin
        os._exit(soak.momentum2_command(soak.command(options, out, 0)))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def saved(out):
    return sorted(int(p.name.removeprefix("step-")) for p in (out / "checkpoints").glob("step-*"))
"""

BY_A_SIGNAL = (
    STOPPED
    + """
alone, out = here / "alone", here / "stopped"
assert code(alone) == 0
assert code(out, 3, lambda: os.kill(os.getpid(), signal.SIGTERM)) == os.EX_TEMPFAIL
said = out.with_suffix(".log").read_text()
assert "Saving after this step" in said and "Run the same command again" in said, said
assert "Traceback" not in said, said
assert saved(out) == [3], saved(out)
assert (out / "metrics.jsonl").read_text().count('"loss"') == 3
assert not (out / "encoder.safetensors").exists()
assert code(out) == 0
assert soak.numbers(out) == soak.numbers(alone)
"""
)


@pytest.mark.slow
def test_a_signal_saves_within_a_step_and_the_run_goes_on_equal(tmp_path: Path, warm_python: str):
    run(warm_python, "-c", BY_A_SIGNAL, tmp_path)


BY_A_FULL_DISK = (
    STOPPED
    + """
def fill():
    while saved(out) != [4]:  # a thread writes it
        time.sleep(0.01)
    with open(here / "rubbish", "wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError as full:
            (here.parent / "why").write_text(full.strerror)

out = here / "run"
assert code(out, 5, fill) == 2  # after the first checkpoint
assert (here.parent / "why").read_text() == "No space left on device"
assert saved(out) == [4]
said = out.with_suffix(".log").read_text()
assert said.splitlines()[-1].startswith("momentum2: ") and "Traceback" not in said, said
assert not list((out / "checkpoints").glob(".tmp-*"))
os.unlink(here / "rubbish")
assert code(out) == 0
assert saved(out)[-1] == 10
"""
)


@pytest.mark.slow
def test_a_full_disk_stops_a_run_in_one_sentence_and_it_goes_on_later(tmp_path: Path, warm_python: str):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs privileges")
    try:
        run(warm_python, "-c", BY_A_FULL_DISK, disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class WithoutPredictor(BYOL):
    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.predictor = nn.Identity()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", [WithoutPredictor, BYOL])
def test_a_collapse_is_noticed_while_it_happens(tmp_path: Path, monkeypatch, method: type[BYOL]):
    """Without a predictor, and with a teacher that is the student, a constant output is the optimum."""
    monkeypatch.setitem(METHODS, "byol", method)
    config = Config(
        method=MethodConfig(teacher_norm="local", weight_momentum=1.0, reference_batch=16),
        model=ModelConfig("resnet18", "small", 0.125, projector_hidden=32, projector_out=16),
        data=DataConfig("shapes", train_size=64, image_size=16, cache_dir=str(tmp_path)),
        eval_data=DataConfig("none"),
        train=TrainConfig(steps=14, batch_size=16, threads=1, precision="fp32"),
        optim=OptimConfig(lr=3.0),
        monitor=MonitorConfig(log_every=1, collapse_steps=3),
    )
    assert pretrain(config, tmp_path / "run").finished
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    said = [record["alarm"] for record in records if "collapsed" in record.get("alarm", "")]
    assert len(said) == (1 if method is WithoutPredictor else 0)


THREADS = """
import os, sys
from pathlib import Path
import torch
import momentum2.training.by_view as by_view
import momentum2.training.loop as train
from momentum2.cli import main

out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
by_view.cpu_threads = lambda: 2 - rank  # what each process would choose by its own look
make_stepper, used = train.Stepper, []
train.Stepper = lambda *rest: (make_stepper(*rest), used.append(torch.get_num_threads()))[0]
size = ["--train.steps=1", "--train.batch_size=8", "--model.width=0.125", "--model.projector_hidden=32"]
data = ["--data.train_size=64", "--monitor.knn_every=0", "--monitor.report=false", "--train.device=cpu"]
code = main(["pretrain", "quickstart", "--out", str(out / "run"), *size, *data])
(out / f"threads-{rank}").write_text(str(used[0]))
sys.exit(code)
"""


def test_all_processes_take_the_threads_that_process_0_chose(tmp_path: Path, warm_python: str):
    """A checkpoint holds one number, so a resumed run could not go on as it was if they differed."""
    program = tmp_path / "program.py"
    program.write_text(THREADS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run(warm_python, *torchrun, program, tmp_path)
    assert [(tmp_path / f"threads-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]


@pytest.mark.parametrize("cached_at_first", [True, False])
def test_a_resumed_run_keeps_what_auto_came_to(tmp_path: Path, monkeypatch, cached_at_first: bool):
    """The machine that goes on has another memory: cached images must not become streamed ones, or these cached."""
    root = tmp_path / "images"
    root.mkdir()
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (16, 48, 48, 3), np.uint8)):
        Image.fromarray(pixels).save(root / f"{i}.png")
    config = Config(
        model=ModelConfig("resnet18", "small", 0.125, projector_hidden=32, projector_out=16),
        data=DataConfig("folder", str(root), image_size=32, cache="auto", cache_dir=str(tmp_path / "cache")),
        train=TrainConfig(
            steps=4, batch_size=8, threads=1, precision="fp32", checkpoint_every=2, device="cpu"
        ),
    )
    memory = {True: 1 << 40, False: 1}
    monkeypatch.setattr(cache, "memory", lambda: memory[cached_at_first])
    assert pretrain(config, tmp_path / "run").finished
    encoder = tmp_path / "run" / "encoder.safetensors"
    whole = encoder.read_bytes()
    encoder.unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    monkeypatch.setattr(cache, "memory", lambda: memory[not cached_at_first])
    assert pretrain(config, tmp_path / "run").finished
    assert encoder.read_bytes() == whole


def test_other_images_are_refused(tmp_path: Path):
    config = Config(
        model=ModelConfig("resnet18", "small", 0.125, projector_hidden=32, projector_out=16),
        data=DataConfig("folder", str(tmp_path / "images"), image_size=16, cache="off"),
        train=TrainConfig(steps=1, batch_size=8, threads=1, precision="fp32", device="cpu"),
    )
    root = tmp_path / "images"
    root.mkdir()
    for i in range(9):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(root / f"{i}.png")
    assert pretrain(config, tmp_path / "run").finished
    plan = (tmp_path / "run" / "plan.txt").read_text()
    (root / "0.png").unlink()
    with pytest.raises(UserError, match="was started with 9 images but now finds 8"):
        pretrain(config, tmp_path / "run")
    assert (tmp_path / "run" / "plan.txt").read_text() == plan
