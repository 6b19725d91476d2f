"""Rows × seeds of a table, a few at a time. Whatever is finished is kept; the same command goes on."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from momentum2.errors import UserError
from momentum2.reproduce.outcome import SECONDS, collect, markdown, plot, read_outcome, read_seconds
from momentum2.reproduce.rows import Pretraining, Row, Table


class Stopped(Exception):
    """A signal ended the work; all of it is saved."""


@dataclass(frozen=True)
class Work:
    """A table to be reproduced.

    Args:
        table: The table, with the rows that are wanted.
        out: Where everything goes.
        seeds: Each row is run with each.
        root: Images to pretrain on, where the scale needs some.
        detection_root: Images with boxes, where the table needs some.
        launcher: What starts a command on several devices, such as `torchrun --nproc-per-node 8`.
        processes: Real processes among which `seconds` divides the batch; 0 takes the time of the runs themselves.
    """

    table: Table
    out: Path
    seeds: tuple[int, ...]
    root: str | None
    detection_root: str | None
    launcher: tuple[str, ...]
    processes: int

    def groups(self) -> Iterator[tuple[Pretraining, int, list[Row]]]:
        """The rows that share a run, seed by seed, so that the first seed of all rows is there first."""
        for seed in self.seeds:
            names = dict.fromkeys(row.pretraining.name for row in self.table.rows)
            for name in names:
                rows = [row for row in self.table.rows if row.pretraining.name == name]
                yield rows[0].pretraining, seed, rows

    def pretrain(self, run: Pretraining, seed: int) -> list[str]:
        return run.command(self.out, seed, self.root)

    def evaluate(self, row: Row, seed: int) -> list[str]:
        run, detector = row.pretraining.run(self.out, seed), row.detector(self.out, seed)
        floors = row is self.table.rows[0] and seed == self.seeds[0]  # they are the same for all
        return row.evaluation.command(run, detector, seed, floors, self.detection_root)

    def text(self, words: list[str]) -> str:
        """A command as a person would type it."""
        start = [*self.launcher, "-m", "momentum2"] if self.launcher else ["momentum2"]
        return shlex.join([*start, *words])


def commands(work: Work) -> list[str]:
    """Every command of the table, in order."""
    lines = []
    for run, seed, rows in work.groups():
        lines.append(work.text(work.pretrain(run, seed)))
        lines += [work.text(work.evaluate(row, seed)) for row in rows]
    return lines


def reproduce(work: Work, jobs: int) -> str:
    """Run what is not finished yet, `jobs` at a time; returns the table as Markdown.

    Raises:
        Stopped: After SIGTERM or SIGINT; the runs have saved their state.
        UserError: If a command fails; the others end first, and the sentence names its log.
    """
    work.out.mkdir(parents=True, exist_ok=True)
    if work.launcher and shutil.which(work.launcher[0]) is None:
        raise UserError(f"--launcher: there is no program called {work.launcher[0]}.")
    with _stop_on_signals() as children, ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(_run_group, work, run, seed, rows, children) for run, seed, rows in work.groups()
        ]
        _finish(work, futures, children)
        if work.processes and "seconds" in work.table.columns:
            _measure_seconds(work, children)
    return write_table(work)


def write_table(work: Work) -> str:
    """Write TABLE.json, TABLE.md and TABLE.png of what is finished; returns the Markdown."""
    texts = {
        (row.key, seed): [
            work.text(work.pretrain(row.pretraining, seed)),
            work.text(work.evaluate(row, seed)),
        ]
        for row in work.table.rows
        for seed in work.seeds
    }
    found = collect(work.table, work.out, work.seeds, texts)
    text, stem = markdown(found), work.out / work.table.name
    stem.with_suffix(".json").write_text(
        json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    if any(row["mean"] for row in found["rows"]) and not plot(found, stem.with_suffix(".png")):
        text += "\nFor a plot: pip install 'momentum2[reproduce]'.\n"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


class _Children:
    """The commands that are running."""

    def __init__(self) -> None:
        self.lock, self.processes, self.stopped = (
            threading.Lock(),
            set[subprocess.Popen[bytes]](),
            threading.Event(),
        )

    def run(self, words: list[str], log: Path) -> int:
        """Run a command to its end with its output in `log`; returns its exit code."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            with self.lock:
                if self.stopped.is_set():
                    raise Stopped
                child = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
                self.processes.add(child)
                if self.stopped.is_set():  # meanwhile
                    child.terminate()
            code = child.wait()
            with self.lock:
                self.processes.discard(child)
        return code

    def stop(self) -> None:
        """Ask all to save and end, and start no more."""
        self.stopped.set()  # first: a signal may come while `run` holds the lock
        for child in list(self.processes):
            child.terminate()


@contextmanager
def _stop_on_signals() -> Iterator[_Children]:
    children = _Children()

    def handle(number: int, frame: FrameType | None) -> None:
        children.stop()

    previous = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield children
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _finish(work: Work, futures: list[Future[None]], children: _Children) -> None:
    """Wait for all, with the table up to date; the first that fails lets those that run come to a checkpoint."""
    waiting = set(futures)
    while waiting:  # in short turns: signals are handled between them
        done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done) and not children.stopped.is_set():
            children.stop()
        if done:
            write_table(work)
    failures = [error for future in futures if (error := future.exception())]
    for error in sorted(
        failures, key=lambda e: isinstance(e, Stopped)
    ):  # a failure says more than its effect
        raise error


def _run_group(work: Work, run: Pretraining, seed: int, rows: list[Row], children: _Children) -> None:
    name, directory = f"{run.name}, seed {seed}", run.run(work.out, seed)
    start, worked = time.monotonic(), False
    if not (directory / "encoder.safetensors").exists():
        print(
            f"{time.strftime('%X')}  start  {name}  (momentum2 watch {shlex.quote(str(directory))})",
            flush=True,
        )
        worked = True
        _command(work, work.pretrain(run, seed), directory.with_suffix(".log"), children)
    for row in rows:
        if read_outcome(row, work.out, seed) is None:
            worked = True
            _command(work, work.evaluate(row, seed), directory.with_suffix(".log"), children)
        found = read_outcome(row, work.out, seed)
        assert found is not None
        numbers = "  ".join(f"{column} {value:.4g}" for column, value in found.numbers.items())
        minutes = f"  in {(time.monotonic() - start) / 60:.1f} min" if worked else "  (finished before)"
        print(f"{time.strftime('%X')}  done   {row.label}, seed {seed}: {numbers}{minutes}", flush=True)


def _command(work: Work, words: list[str], log: Path, children: _Children) -> None:
    start = list(work.launcher) or [sys.executable]
    code = children.run([*start, "-m", "momentum2", *words], log)
    if code == os.EX_TEMPFAIL or (code and children.stopped.is_set()):
        raise Stopped
    if code:
        said = [
            line for line in log.read_text(errors="replace").splitlines() if line.startswith("momentum2: ")
        ]
        why = said[-1].removeprefix("momentum2: ") if code == 2 and said else f"It ended with code {code}."
        raise UserError(f"{work.text(words)} failed: {why} Its log is {log}.")


def _measure_seconds(work: Work, children: _Children) -> None:
    """Seconds per iteration of each row, in turns on real processes: what the norms' communication costs."""
    runs = {row.pretraining.name: row.pretraining.run(work.out, work.seeds[0]) for row in work.table.rows}
    known = read_seconds(work.out)
    if known.keys() >= runs.keys():
        return
    print(f"{time.strftime('%X')}  start  seconds per iteration on {work.processes} processes", flush=True)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(work.processes), "-m", "momentum2.reproduce.timing"]
    log, new = work.out / "seconds.log", work.out / "seconds.new.json"
    code = children.run([*words, str(new), *(str(run / "config.yaml") for run in runs.values())], log)
    if children.stopped.is_set():
        raise Stopped
    if code:
        raise UserError(f"Measuring the seconds per iteration failed; the log is {log}.")
    measured = dict(zip(runs, json.loads(new.read_text(encoding="utf-8")), strict=True))
    new.write_text(json.dumps(known | measured, indent=1) + "\n", encoding="utf-8")
    new.replace(work.out / SECONDS)
