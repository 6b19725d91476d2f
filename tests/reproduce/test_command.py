"""`momentum2 reproduce` as a user runs it, interrupts it and gets it wrong."""

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from momentum2.cli import main
from momentum2.errors import UserError
from momentum2.reproduce import runner
from momentum2.runs.results import read_results

ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1")


def command(python: str, out: Path, *words: str) -> list[str]:
    return [
        python, "-m", "momentum2", "reproduce", "bn-statistics", "--rows", "split-momentum",
        "--out", str(out), *words,
    ]  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, "It has ended before."
        time.sleep(0.05)


#: Starts `-m momentum2 ...` as Python does, but the run waits in its fourth step for what will happen to it.
STANDS_STILL = """
import runpy, signal, sys
from pathlib import Path
from momentum2.methods.method import Method

def begin(method, k, begin=Method.before_step):
    if k + 1 == 4:
        Path(__file__).with_name("training").touch()
        signal.pause()
    begin(method, k)

Method.before_step = begin
sys.argv = sys.argv[2:]
runpy.run_module("momentum2", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_killed_row_goes_on_and_a_finished_one_is_not_run_again(tmp_path: Path, warm_python: str):
    out, program, no_python = tmp_path / "out", tmp_path / "stands_still.py", tmp_path / "no_python"
    run = out / "runs" / "quickstart" / "seed-0"
    program.write_text(STANDS_STILL)
    # A session of its own: SIGKILL to all of it is what a scheduler or a power cut does.
    words = command(sys.executable, out, "--launcher", f"{sys.executable} {program}")
    with subprocess.Popen(words, env=ENVIRONMENT, start_new_session=True, text=True) as first:
        wait_for((tmp_path / "training").exists, first)
        os.killpg(first.pid, signal.SIGKILL)
    assert not (run / "encoder.safetensors").exists()

    no_python.write_text("#!/bin/sh\nexec sleep 1000000\n")  # what torchrun starts to measure the seconds
    no_python.chmod(0o755)
    environment = ENVIRONMENT | {"PYTHON_EXEC": str(no_python)}
    words = command(warm_python, out)
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as second:
        wait_for(lambda: len(read_results(run / "results.json")) == 3, second)
        second.terminate()  # before the seconds are measured: the row itself is finished
        said, _ = second.communicate()
    assert second.returncode == os.EX_TEMPFAIL
    assert "Run the same command again" in said
    before = (run / "encoder.safetensors").stat().st_mtime_ns

    third = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "finished before" in third.stdout
    assert (run / "encoder.safetensors").stat().st_mtime_ns == before
    found = json.loads((out / "bn-statistics.json").read_text())
    (row,) = (r for r in found["rows"] if r["seeds"])
    assert row["row"] == "local-momentum"
    assert row["seeds"][0]["numbers"]["top-1"] > 0
    assert row["mean"]["seconds"] > 0
    assert set(found["floors"]) == {"random initialization", "raw pixels", "whitened patches"}
    assert "| student BN, teacher Momentum BN |" in (out / "bn-statistics.md").read_text()


@pytest.mark.slow
def test_a_command_that_fails_is_named(tmp_path: Path, capsys):
    (tmp_path / "empty" / "train").mkdir(parents=True)
    words = ["reproduce", "alpha", "--scale", "cifar", "--rows", "alpha-cosine", "--seeds", "0"]
    assert main([*words, "--data", str(tmp_path / "empty"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("momentum2: momentum2 pretrain cifar10-cpu-paper")
    assert "The log is" in error
    assert error.count("\n") == 1


def test_what_is_left_is_estimated_from_the_runs_that_worked(caplog, monkeypatch):
    before, first, second, third = futures = [Future[float]() for _ in range(4)]
    before.set_result(0.0)  # finished by an earlier command: says nothing about the time
    first.set_result(600.0)

    def the_others_end(work: object) -> str:
        for future in (second, third):
            if not future.done():
                future.set_result(600.0)
        return ""

    monkeypatch.setattr(runner, "write_table", the_others_end)
    with caplog.at_level(logging.INFO, "momentum2"):
        runner._finish(None, futures, 2, runner._Children())
    (line,) = caplog.messages
    assert line.endswith("2 of 4 runs have ended, about 0:10:00 left")  # two at a time, ten minutes each


def test_a_row_that_fails_lets_the_others_come_to_their_end(monkeypatch):
    failed, other = futures = [Future[float](), Future[float]()]
    failed.set_exception(UserError("It diverged."))
    children = runner._Children()
    stopped = []

    def the_other_ends(work: object) -> str:
        stopped.append(children.is_stopped())
        if not other.done():
            other.set_result(1.0)
        return ""

    monkeypatch.setattr(runner, "write_table", the_other_ends)
    with pytest.raises(UserError, match="It diverged"):
        runner._finish(None, futures, 2, children)
    assert stopped == [False, False]  # written after each


def test_an_error_of_our_own_stops_what_runs(monkeypatch):
    def full_disk(work: object) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr(runner, "write_table", full_disk)
    done, running = Future[float](), Future[float]()
    done.set_result(1.0)
    children = runner._Children()
    with pytest.raises(OSError, match="No space"):
        runner._finish(None, [done, running], 2, children)
    assert children.is_stopped()


def test_a_run_gets_the_machines_that_the_paper_gave_it(capsys):
    assert main(["reproduce", "bn-batch-size", "--scale", "paper", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    byol = [line for line in lines if "pretrain" in line and "teacher_norm=split" in line]
    # One BN device a GPU, 8 GPUs a machine: 4096 images over 64, 128, 256 and 512 samples of BN.
    assert [re.findall(r"--nnodes (\d+)", line) for line in byol] == [["8"], ["4"], ["2"], []]
    ours = [line for line in lines if "pretrain" in line and "teacher_norm=split" not in line]
    assert len(ours) == 5
    assert all("--nnodes 16 " in line for line in ours)
    assert not any("--nnodes" in line for line in lines if " evaluate " in line)

    launcher = "srun -N {nodes} start"
    assert main(["reproduce", "moco", "--scale", "paper", "--dry-run", "--launcher", launcher]) == 0
    pretrain, evaluate, *_ = capsys.readouterr().out.splitlines()
    assert pretrain.startswith("srun -N 4 start -m momentum2 pretrain moco-v2 ")
    assert evaluate.startswith("srun -N 1 start -m momentum2 evaluate linear ")


def test_dry_run_prints_commands_and_makes_nothing(tmp_path: Path, capsys):
    out = tmp_path / "out"
    assert main(["reproduce", "linear", "--scale", "paper", "--dry-run", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 6  # a pretraining and an evaluation of each row but the cited ones
    pretraining, evaluation = lines[::2], lines[1::2]
    on_a_cluster = [
        line for line in pretraining if line.startswith("torchrun --nnodes 16 --nproc-per-node 8 ")
    ]
    on_a_machine = [line for line in pretraining if line.startswith("torchrun --nproc-per-node 8 -m ")]
    assert (len(on_a_cluster), len(on_a_machine)) == (4, 2)
    assert all(" pretrain moco-v2-8gpu " in line for line in on_a_machine)
    assert all(line.startswith("torchrun --nproc-per-node 8 -m momentum2 evaluate ") for line in evaluation)
    assert "--protocol byol --network student" in evaluation[0]
    assert not out.exists()


def test_another_loss_and_other_samples_are_runs_of_their_own(tmp_path: Path, capsys):
    def lines(*words: str) -> list[str]:
        command = [
            "reproduce",
            "bn-statistics",
            "--rows",
            "local-local",
            "--dry-run",
            "--out",
            str(tmp_path),
            *words,
        ]
        assert main(command) == 0
        return [line for line in capsys.readouterr().out.splitlines() if " pretrain " in line]

    (plain,), (fast,), (two,) = lines(), lines("--loss", "repulsion"), lines("--samples", "2")
    assert lines("--samples", "4") == [plain]  # the scale's own
    assert "repulsion" not in plain
    assert "--method.repulsion batch --method.predictor false" in fast
    assert "--train.devices 16" in fast
    assert "--train.devices 32" in two
    assert len({line.split(" --out ")[1] for line in (plain, fast, two)}) == 3


def test_detectors_at_the_papers_scale_come_with_their_commands_on_detectron2(tmp_path: Path, capsys):
    out = tmp_path / "out"
    for table, rows in (("coco", 8 * 5), ("lvis", 4)):
        assert main(["reproduce", table, "--scale", "paper", "--dry-run", "--out", str(out)]) == 0
        lines = capsys.readouterr().out.splitlines()
        ours = [line for line in lines if " detect " in line]
        theirs = [shlex.split(line.removeprefix("# ")) for line in lines if "train.py" in line]
        exports = [shlex.split(line.removeprefix("# ")) for line in lines if " export " in line]
        assert len(ours) == len(theirs) == rows
        assert all(line.startswith("# ") for line in lines if "train.py" in line or " export " in line)
        # Each is exported before it is trained, once for each run and network; random weights are no file.
        assert len({words[-1] for words in exports}) == len(exports)
        assert {Path(words[1]).parent for words in theirs} == {Path(words[-1]) for words in exports}
        assert sum(
            words[-2:] == ["MODEL.WEIGHTS", ""] or words[-1] == "train.init_checkpoint=''" for words in theirs
        ) == (rows // 4 if table == "lvis" else rows // 5)
        # Those of FCOS are read by Hydra, which takes a path with "," or "=" in it only in quotes.
        lazy = [word for words in theirs for word in words if word.startswith("train.output_dir=")]
        assert len(lazy) == (0 if table == "lvis" else rows // 4)
        assert all(re.fullmatch(r"train\.output_dir='[^'\\]+'", word) for word in lazy)
        names = {Path(words[words.index("--config-file") + 1]).stem for words in theirs}
        models = ("mask_rcnn", "cascade_rcnn", "retinanet", "fcos")
        assert names == ({"lvis"} if table == "lvis" else {f"{m}_{n}x" for m in models for n in (1, 2)})
        if table == "lvis":
            assert all("--schedule 1x" in line for line in ours)  # 90,000 steps
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Missing argument TABLE"),
        (["alhpa"], "Did you mean alpha?"),
        (["alpha", "--scale", "huge"], "--scale takes"),
        (["alpha", "--rows", "alpha-2"], "Its rows are alpha-cosine"),
        (["linear", "--scale", "paper", "--rows", "m2,jigsaw-90", "--dry-run"], "'jigsaw-90' is cited"),
        (["alpha", "--seeds", "0,x"], "--seeds takes whole numbers"),
        (["alpha", "--seeds", ""], "--seeds takes whole numbers"),
        (["alpha", "--jobs", "0"], "--jobs must be at least 1"),
        (["alpha", "--scale", "cifar"], "--data is required."),
        (["alpha", "--scale", "cifar", "--data", "nowhere"], "--data nowhere is not a folder"),
        (["coco", "--scale", "paper", "--data", ".", "--launcher", "env"], "--detection_data is required"),
        (
            ["semi", "--scale", "paper", "--data", ".", "--launcher", "env"],
            "There is no 1percent.txt in this folder",
        ),
        (["alpha", "--scale", "paper", "--data", "."], "--launcher is required"),
        (["alpha", "--data", "."], "--data does not apply to scale smoke"),
        (["alpha", "--epochs", "0"], "--epochs must be at least 1"),
        (["moco", "--loss", "repulsion"], "--loss repulsion is only for tables of BYOL; moco has moco"),
        (["alpha", "--samples", "3"], "--samples must divide the batch of 64"),
        (["bn-batch-size", "--samples", "8"], "--samples is what the rows of bn-batch-size differ in"),
        (
            ["alpha", "--scale", "paper", "--samples", "8", "--dry-run"],
            "--samples is only for the scales smoke and cifar",
        ),
        (["alpha", "--out", "/dev/null/x"], "cannot be created"),
        (["alpha", "--launcher", "srun 'start"], "no closing quotation"),
        (["alpha", "--launcher", "no-such-program"], "--launcher needs a program called no-such-program"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
