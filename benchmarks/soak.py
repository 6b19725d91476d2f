"""Kill training runs over and over with SIGKILL, resume them, and compare with a run that was left alone.

Every tensor of the final checkpoint, the exported encoder and every logged number must be equal to the last
bit, and a run with another seed must differ (else the comparison would prove nothing). Kills come at random
moments, many of them while a checkpoint is being written. With --processes 2 or more torchrun starts the
runs, one process at a time is killed, and torchrun restarts. Exits with 1 if anything differs. Needs Linux.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Imported here once: the runs are forks of this process and start at once. The command line imports torch when it
# needs it, and the first optimizer imports dynamo.
import torch._dynamo  # noqa: F401

import momentum2.api  # noqa: F401
from momentum2.cli import main as momentum2_command

#: What differs from run to run without any fault.
TIMES = ("images_per_second", "step_time", "data_wait", "memory_gb")


class Broken(Exception):
    """A run ended in a way that it must not."""


def command(options: argparse.Namespace, out: Path, seed: int) -> list[str]:
    """The command of one run."""
    settings = {
        "out": out,
        "method.name": options.method,
        "method.queue_size": 32,
        "model.width": 0.125,
        "model.projector_hidden": 32,
        "model.projector_out": 16,
        "data.train_size": 32,
        "data.image_size": 16,
        "data.cache_dir": out.parent / "cache",
        "data.workers": options.workers,
        "eval_data.name": "none",
        "train.steps": options.steps,
        "train.batch_size": 8,
        "train.accumulate": options.accumulate,
        "train.seed": seed,
        "train.checkpoint_every": 4,
        "train.threads": 1,
        "train.precision": "fp32",
        "monitor.log_every": 1,
        "monitor.knn_every": 0,
        "monitor.report": "false",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return ["pretrain", "quickstart", *flags]


@dataclass
class Killer:
    """Chooses moments, and counts what happened at them."""

    kills: int
    draw: random.Random = field(default_factory=random.Random)
    done: int = 0
    while_saving: int = 0
    before_first: int = 0
    before: set[tuple[str, int]] = field(default_factory=set)

    def wait(self, out: Path, has_ended: Callable[[], bool]) -> bool:
        """Wait for a moment to kill the run in `out`; False if there is none, because all is done."""
        if self.done == self.kills:
            return False
        self.before = _folders(out)
        begin, lines, steps = time.monotonic(), _lines(out), self.draw.randrange(8)
        saving = self.draw.random() < 0.4
        while not (self._is_saving(out) if saving else _lines(out) >= lines + steps):
            if has_ended():
                return False
            time.sleep(0.0005)
        a_step = max(0.2, (time.monotonic() - begin) / (steps + 1))
        end = time.monotonic() + self.draw.uniform(0, 0.004 if saving else a_step)
        while time.monotonic() < end and not has_ended():
            time.sleep(0.0005)
        return not has_ended()

    def count(self, out: Path) -> None:
        """Note a kill, by what it left behind."""
        self.done += 1
        self.while_saving += self._is_saving(out)
        self.before_first += not any(name.startswith("step-") for name, _ in _folders(out))

    def _is_saving(self, out: Path) -> bool:
        return any(name.startswith(".tmp-") for name, _ in _folders(out) - self.before)


def _lines(out: Path) -> int:
    """How many steps are logged."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _folders(out: Path) -> set[tuple[str, int]]:
    """Name and identity of the checkpoints, finished or not."""
    folder = out / "checkpoints"
    return {(entry.name, entry.inode()) for entry in os.scandir(folder)} if folder.exists() else set()


def run_alone(arguments: list[str], out: Path, killer: Killer) -> None:
    """Start the run in `out`, kill it and start it again, until it ends by itself."""
    log = out.with_suffix(".log")
    while True:
        process = os.fork()
        if process == 0:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os._exit(momentum2_command(arguments))
        ours = os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT
        killed = killer.wait(out, lambda ours=ours: os.waitid(*ours) is not None)
        if killed:
            os.kill(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code == 0:
            return
        if not killed:
            raise Broken(f"it ended with {code}:\n{log.read_text()[-2000:]}")
        killer.count(out)


def run_several(arguments: list[str], out: Path, killer: Killer, processes: int) -> None:
    """Let torchrun start the run in `out`, and kill one of its processes again and again."""
    log = out.with_suffix(".log")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    torchrun += ["--max-restarts", str(killer.kills), "-m", "momentum2"]
    with log.open("w") as said:
        agent = subprocess.Popen([*torchrun, *arguments], stdout=said, stderr=said)
        victims: set[int] = set()
        while agent.poll() is None:
            workers = _children(agent.pid) - victims
            if not _is_training(out, workers) or len(workers) < processes:
                time.sleep(0.05)
            elif killer.wait(out, lambda: agent.poll() is not None):
                os.kill(killer.draw.choice(sorted(workers)), signal.SIGKILL)
                killer.count(out)
                victims |= workers
            else:
                agent.wait()
    if agent.returncode:
        raise Broken(f"torchrun ended with {agent.returncode}:\n{log.read_text()[-2000:]}")


def _children(process: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()}


def _is_training(out: Path, workers: set[int]) -> bool:
    """Whether one of them has opened the run directory: imports are over."""
    lock = out / ".lock"
    holder = lock.read_text().split() if lock.exists() else []
    return len(holder) > 1 and int(holder[1]) in workers


def numbers(out: Path) -> dict[str, Any]:
    """All that must be equal: hashes of the tensors, and the logged values."""
    last = max((out / "checkpoints").glob("step-*"))
    files = [*last.glob("*.safetensors"), out / "encoder.safetensors"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = [{k: v for k, v in line.items() if k not in TIMES} for line in lines if "alarm" not in line]
    return {"metrics.jsonl": logged} | {file.name: _content(file) for file in files}


def _content(file: Path) -> tuple[dict[str, Any], str]:
    """Header and hash of the tensors of a safetensors file; the order in its header is arbitrary."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), hashlib.sha256(data[end:]).hexdigest()


@dataclass
class Soak:
    """The runs of one soak, in a place of their own."""

    options: argparse.Namespace
    place: Path
    begin: float = field(default_factory=time.monotonic)

    def run(self, name: str, seed: int, killer: Killer) -> dict[str, Any]:
        out, processes = self.place / name, self.options.processes
        arguments = command(self.options, out, seed)
        if processes == 1:
            run_alone(arguments, out, killer)
        else:
            run_several(arguments, out, killer, processes)
        done = f"{killer.done} kills so far" if killer.kills else "left alone"
        print(f"  {name}: finished, {done}, {time.monotonic() - self.begin:.0f} s", flush=True)
        return numbers(out)

    def result(self) -> bool:
        """Run everything and print a summary; True if all is as it must be."""
        seed, kills = self.options.seed, self.options.kills
        expected = self.run("reference", seed, Killer(0))
        control = self.run("control", seed + 1, Killer(0)) if self.options.control else {}
        killer, runs, differing = Killer(kills, random.Random(seed)), 0, []
        while killer.done < kills:
            name = f"killed-{runs}"
            found = self.run(name, seed, killer)
            differing += [f"{name}/{what}" for what in expected if found.get(what) != expected[what]]
            runs += 1
        blind = [what for what in control if control[what] == expected[what]]
        for what, value in {
            "kills": killer.done,
            "  while saving": killer.while_saving,
            "  before a checkpoint": killer.before_first,
            "runs finished": runs,
            "compared": f"{', '.join(expected)} ({len(expected['metrics.jsonl'])} lines)",
            "differing": ", ".join(differing) or "none: equal to the last bit",
            "with another seed": f"EQUAL: {', '.join(blind)}" if blind else f"{len(control)} of them differ",
        }.items():
            print(f"{what:<22}{value}")
        return not differing and not blind


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kills", type=int, help="how many kills")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--method", default="byol", choices=("byol", "moco", "simsiam", "simclr"))
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--workers", type=int, default=0, help="decoding processes")
    parser.add_argument("--processes", type=int, default=1, help="training processes, started by torchrun")
    parser.add_argument("--seed", type=int, default=0, help="of training and of the moments of the kills")
    parser.add_argument("--no-control", dest="control", action="store_false", help="no run with another seed")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"{options.method}, {options.steps} steps, {options.processes} process(es), in {place}", flush=True)
    try:
        good = Soak(options, place).result()
    except Broken as broken:
        print(f"A run could not be resumed: {broken}")
        return 1
    if good:
        shutil.rmtree(place)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
