"""Kill training runs over and over with SIGKILL, resume them, and compare with a run that was left alone.

Every tensor of the final checkpoint, the exported encoder and every logged number must be equal to the last
bit, and a run with another seed must differ (else the comparison would prove nothing). Kills come at random
moments, many of them while a checkpoint is being written. With --processes 2 or more torchrun starts the
runs, one process at a time is killed, and torchrun restarts. Exits with 1 if anything differs. Needs Linux.

With --all the kills go round over every kind of run: pretraining, accumulation, a queue with cached images, linear
evaluation, detection, two processes, and a number of processes that changes from start to start. A third of them come
from inside: at a drawn system call that writes (open, fsync, rename, unlink, mkdir), after half of the file is cut off.
With --log the counts are kept in a file, and the same command goes on from there.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
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

from momentum2.cli import main as momentum2_command

#: What differs from run to run without any fault.
TIMES = ("images_per_second", "step_time", "cpu_time", "data_wait", "memory_gb")


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
    return ["pretrain", "quickstart-paper", *flags]


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


# -- every kind of run


@dataclass(frozen=True)
class Kind:
    """One kind of run.

    Args:
        arguments: Its command line, in a folder of its own.
        out: Its run directory, from there.
        worlds: Numbers of processes, one of which is drawn at each start.
        first: What must have been run before.
        exact: Whether bits are compared; with another number of processes sums are added in another order.
    """

    arguments: tuple[str, ...]
    out: str = "run"
    worlds: tuple[int, ...] = (1,)
    first: tuple[str, ...] = ()
    exact: bool = True


def _words(command: str, settings: dict[str, object]) -> tuple[str, ...]:
    return (*command.split(), *(f"--{name}={value}" for name, value in settings.items()))


_PRETRAIN: dict[str, object] = {
    "out": "run",
    "method.name": "byol",  # with a teacher, whose histories must survive too
    "model.width": 0.125,
    "model.projector_hidden": 16,
    "model.projector_out": 8,
    "data.train_size": 32,
    "data.image_size": 16,
    "data.cache_dir": "cache",
    "eval_data.name": "none",
    "train.steps": 12,
    "train.batch_size": 8,
    "train.checkpoint_every": 2,
    "train.threads": 1,
    "train.precision": "fp32",
    "monitor.log_every": 1,
    "monitor.knn_every": 0,
    "monitor.report": "false",
}
_START = _words("pretrain quickstart", _PRETRAIN | {"out": "start", "train.steps": 2})
_LINEAR: dict[str, object] = {
    "data.name": "shapes",
    "data.train_size": 96,  # some of every class
    "data.image_size": 16,
    "data.cache_dir": "cache",
    "epochs": 2,
    "batch_size": 8,
    "floors": "false",
    "threads": 1,
    "feature_batch": 2000,
    "out": "run",
}
_DETECT: dict[str, object] = {
    "out": "run",
    "model": "retinanet",
    "init": "random",
    "encoder.width": 0.125,
    "head.fpn_channels": 32,
    "head.detections": 10,
    "data.short_edges": "[32]",
    "data.test_short_edge": 32,
    "data.max_long_edge": 32,
    "data.train_size": 8,
    "data.test_size": 2,
    "data.workers": 0,
    "train.batch_size": 2,
    "train.steps": 6,
    "train.checkpoint_every": 2,
    "train.threads": 1,
    "train.device": "cpu",
    "monitor.log_every": 1,
    "evaluate_every": 0,
}
_TWO: dict[str, object] = {"train.devices": 2, "train.batch_size": 16}
KINDS = {
    "pretraining": Kind(_words("pretrain quickstart", _PRETRAIN)),
    "accumulation": Kind(_words("pretrain quickstart", _PRETRAIN | {"train.accumulate": 2})),
    "queue and cache": Kind(
        _words(
            "pretrain quickstart",
            _PRETRAIN | {"method.name": "moco", "method.queue_size": 32, "data.cache": "on"},
        )
    ),
    "linear": Kind(_words("evaluate linear start", _LINEAR), first=_START),
    "detection": Kind(_words("detect", _DETECT)),
    "2 processes": Kind(_words("pretrain quickstart", _PRETRAIN | _TWO), worlds=(2,)),
    "1 or 2 processes": Kind(_words("pretrain quickstart", _PRETRAIN | _TWO), worlds=(1, 2), exact=False),
}
#: Kills, those inside a write, those that cut off a file, changes of the number of processes, and how often the others
#: had to be asked to end.
_COUNTS = ("kills", "inside", "torn", "regrouped", "asked")
#: System calls that change what is on the disk.
_WRITES = ("open", "fsync", "replace", "rename", "unlink", "mkdir")


def _die_in_a_write(after: int, torn: bool) -> None:
    """From now on, kill this process at the write number `after`; `torn`: half of what it syncs is lost before."""
    count = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            changes = name != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR)
            count += bool(changes)
            if changes and count == after:
                if torn and name == "fsync":
                    with contextlib.suppress(OSError):  # a folder
                        os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in _WRITES:
        wrap(name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launch(kind: Kind, place: Path, world: int, victim: int | None, in_write: int, torn: bool) -> list[int]:
    """Start the processes of a run; one of them may die in a write."""
    port, started = _free_port(), []
    for rank in range(world):
        process = os.fork()
        if process:
            started.append(process)
            continue
        os.chdir(place)
        descriptor = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        if world > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            os.environ |= {
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        if rank == victim and in_write:
            _die_in_a_write(in_write, torn)
        code = 1
        try:
            code = momentum2_command(list(kind.arguments))
        finally:
            sys.stdout.flush()
            os._exit(code)
    return started


def _seconds(process: int) -> float:
    """CPU seconds of a process that is ours; infinite when it has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return float("inf")
    return (
        float("inf") if fields[0] == "Z" else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    )


@dataclass
class Round:
    """One run of a kind, killed and resumed until it ends by itself."""

    kind: Kind
    place: Path
    draw: random.Random
    typical: float  # CPU seconds of a run that is left alone
    writes: int  # about as many of them it has
    kills: int = 0
    inside: int = 0
    torn: int = 0
    regrouped: int = 0
    asked: int = 0

    def run(self) -> None:
        last_world = 0
        for _ in range(10_000):
            world = self.draw.choice(self.kind.worlds)
            self.regrouped += bool(last_world) and world != last_world
            last_world = world
            if self._start(world):
                return
        raise Broken("it never ended")

    def _start(self, world: int) -> bool:
        """Start it once, kill it; whether it came to its end."""
        inside, torn = self.draw.random() < 1 / 3, self.draw.random() < 0.5
        victim = self.draw.randrange(world)
        number = self.draw.randint(1, max(2, self.writes)) if inside else 0
        rank = 0 if inside else victim  # process 0 writes
        processes = _launch(self.kind, self.place, world, rank, number, torn)
        if not inside:
            moment = self.draw.uniform(0, self.typical)
            while _seconds(processes[victim]) < moment:
                time.sleep(0.0005)
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[victim], signal.SIGKILL)
        codes, asked = self._end(processes)
        killed = codes[rank] == -signal.SIGKILL
        if killed:
            self.kills += 1
            self.inside += inside
            self.torn += inside and torn
            self.asked += asked
        if all(code == 0 for code in codes):
            return True
        others = [code for i, code in enumerate(codes) if i != rank]
        good = (0, 1, 75, -signal.SIGTERM) if asked else (0, 1)
        if not killed or any(code not in good for code in others):
            raise Broken(f"ended with {codes}:\n{(self.place / 'log').read_text()[-2000:]}")
        return False

    def _end(self, processes: list[int]) -> tuple[list[int], bool]:
        """How they ended, and whether they were asked to.

        When one has failed, the others notice and end by themselves, or, as with a launcher, are asked to: who
        connects to a process that was killed before it listened cannot know. Not to end then is a fault.
        """
        codes: dict[int, int] = {}
        asked, left = False, 600.0  # seconds, of which those do not count in which we are stopped too
        while len(codes) < len(processes):
            for process in set(processes) - set(codes):
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    codes[process] = os.waitstatus_to_exitcode(status)
                    if codes[process] and not asked:
                        left = min(left, 5.0)
            if left < 0:
                rest, ask = set(processes) - set(codes), any(codes.values()) and not asked
                for process in rest:
                    os.kill(process, signal.SIGTERM if ask else signal.SIGKILL)
                if not ask:
                    for process in rest:
                        os.waitpid(process, 0)
                    raise Broken("a process did not end" + ", though it was asked to" * asked)
                asked, left = True, 60.0
            time.sleep(0.002)
            left -= 0.002
        return [codes[process] for process in processes], asked


def everything(kind: Kind, place: Path) -> dict[str, Any]:
    """All that must be equal in a finished run."""
    out = place / kind.out
    last = max((out / "checkpoints").glob("step-*"))
    files = [*last.glob("*.safetensors"), *out.glob("*.safetensors")]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = [{k: v for k, v in line.items() if k not in TIMES} for line in lines if "alarm" not in line]
    if not kind.exact:
        return {"steps": [line["step"] for line in logged], "files": sorted(file.name for file in files)}
    found: dict[str, Any] = {"metrics.jsonl": logged}
    for name in ("results.json", "detections.json"):
        for folder in (place, out, place / "start"):
            if (folder / name).is_file():
                found[f"{folder.name}/{name}"] = json.loads((folder / name).read_text())
    return found | {file.name: _content(file) for file in files}


def soak_all(kills: int, log: Path | None, seconds: float, seed: int) -> bool:
    """Kill runs of every kind in turn until there were so many kills, or the time is over; True if none was harmed."""
    begin, entries = time.monotonic(), list[dict[str, Any]]()
    if log is not None and log.exists():
        entries = [json.loads(line) for line in log.read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        place, right = Path(folder), dict[str, tuple[dict[str, Any], float, int]]()
        while sum(entry["kills"] for entry in entries) < kills and time.monotonic() - begin < seconds:
            name = min(KINDS, key=lambda name: sum(e["kills"] for e in entries if e["kind"] == name))
            if name not in right:
                right[name] = _alone(KINDS[name], place / f"alone {name}")
                print(f"{name}: {right[name][1]:.1f} s of CPU, {right[name][2]} writes", flush=True)
            expected, typical, writes = right[name]
            here = place / f"{name} {len(entries)}"
            _prepare(KINDS[name], here, place / f"alone {name}")
            draw = random.Random(f"{seed} {len(entries)}")
            one, trouble = Round(KINDS[name], here, draw, typical, writes), ""
            try:
                one.run()
                found = everything(KINDS[name], here)
                trouble = ", ".join(what for what in expected if found.get(what) != expected[what])
                trouble = f"differs: {trouble}" if trouble else ""
            except Broken as broken:
                trouble = f"cannot go on: {broken}"
            counts = {key: getattr(one, key) for key in _COUNTS}
            entries.append({"kind": name, **counts, "trouble": trouble})
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(entries[-1]) + "\n")
            if trouble:
                print(f"{name}: {trouble}", flush=True)
            shutil.rmtree(here)
    _print_table(entries)
    return not any(entry["trouble"] for entry in entries)


def _prepare(kind: Kind, here: Path, alone: Path) -> None:
    here.mkdir()
    if kind.first:
        shutil.copytree(alone / "start", here / "start")
        (here / "start" / "results.json").unlink(missing_ok=True)


def _alone(kind: Kind, place: Path) -> tuple[dict[str, Any], float, int]:
    """What a run that is left alone ends with, its CPU seconds and its number of writes."""
    place.mkdir()
    if kind.first:
        _finish(_launch(Kind(kind.first), place, 1, None, 0, False), place)
    world = kind.worlds[-1]
    used = _finish(_launch(kind, place, world, None, 0, False), place) / world
    checkpoints = 2 + len((place / kind.out / "metrics.jsonl").read_text().splitlines()) // 2
    return everything(kind, place), used, 14 * checkpoints


def _finish(processes: list[int], place: Path) -> float:
    """Wait for processes that must succeed; returns their CPU seconds."""
    used = 0.0
    for process in processes:
        _, status, usage = os.wait4(process, 0)
        if status:
            raise Broken(f"a run that was left alone failed:\n{(place / 'log').read_text()[-2000:]}")
        used += usage.ru_utime + usage.ru_stime
    return used


def _print_table(entries: list[dict[str, Any]]) -> None:
    print(
        f"{'':<20}{'runs':>6}{'kills':>7}{'in a write':>12}{'torn':>6}{'regrouped':>11}{'asked':>7}{'harmed':>8}"
    )
    for name in [*KINDS, "all"]:
        rows = [entry for entry in entries if name in (entry["kind"], "all")]
        sums = [sum(row[key] for row in rows) for key in _COUNTS]
        harmed = sum(bool(row["trouble"]) for row in rows)
        counts = "".join(f"{n:>{width}}" for n, width in zip(sums, (7, 12, 6, 11, 7), strict=True))
        print(f"{name:<20}{len(rows):>6}{counts}{harmed:>8}")


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
    parser.add_argument("--all", action="store_true", help="go round over every kind of run")
    parser.add_argument("--log", type=Path, help="where the counts of --all are kept, to go on from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop --all after this many")
    options = parser.parse_args()
    if options.all:
        return 0 if soak_all(options.kills, options.log, options.seconds, options.seed) else 1
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
