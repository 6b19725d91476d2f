"""Rows × seeds of a table, a few at a time. Whatever is finished is kept; the same command resumes the rest."""

import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from types import FrameType

from momentum2.errors import SettingError, Stopped, UserError, shown
from momentum2.files import append, read, read_json, write_whole
from momentum2.recipes import CLUSTER, MACHINE, find
from momentum2.reproduce.outcome import collect, is_evaluated, markdown, plot, read_outcome
from momentum2.reproduce.rows import Evaluation, Pretraining, Row, Table
from momentum2.runs.directory import check_config
from momentum2.runs.names import CONFIG, ENCODER
from momentum2.settings import override
from momentum2.training.checks import method_class
from momentum2.training.plan import idle_settings

_log = logging.getLogger("momentum2")


@dataclass(frozen=True)
class Work:
    """A table to reproduce.

    Args:
        table: The table.
        keys: The rows to run.
        out: Where everything goes.
        seeds: Each row is run with each.
        root: Images to pretrain on, where the scale needs some.
        detection_root: Images with boxes, where the table needs some.
        launcher: What starts a command on several devices, such as `torchrun --nproc-per-node 8`, with `{nodes}` for
            the number of machines; None for torchrun at the paper's scale, and for nothing at the others.
        processes: Real processes among which `seconds` divides the batch; 0 takes the time of the runs themselves.
    """

    table: Table
    keys: tuple[str, ...]
    out: Path
    seeds: tuple[int, ...]
    root: str | None
    detection_root: str | None
    launcher: str | None
    processes: int

    def groups(self) -> Iterator[tuple[Pretraining, int, list[Row]]]:
        """The rows that share a run, seed by seed, so that the first seed of all rows is there first."""
        wanted = [row for row in self.table.rows if row.key in self.keys]
        for seed in self.seeds:
            for name in dict.fromkeys(row.pretraining.name for row in wanted):
                rows = [row for row in wanted if row.pretraining.name == name]
                yield rows[0].pretraining, seed, rows

    def pretrain(self, run: Pretraining, seed: int) -> list[str]:
        return run.command(self.out, seed, self.root)

    def evaluate(self, row: Row, evaluation: Evaluation, seed: int) -> list[str]:
        run, detector = row.pretraining.run(self.out, seed), row.detector(self.out, seed)
        floors = row.key == self.keys[0] and seed == self.seeds[0]  # they are the same for all
        return evaluation.command(run, detector, seed, floors, self.detection_root)

    def nodes(self, run: Pretraining) -> int:
        """Machines of 8 GPUs that give each of its devices a GPU of its own, as in the paper."""
        flags = {**run.common, **run.changes}
        devices = flags.get("train.devices", find(run.recipe).config.train.devices)
        return math.ceil(devices / 8) if isinstance(devices, int) else 1

    def start(self, nodes: int) -> list[str]:
        """What starts `-m momentum2 ...` on this many machines; nothing if it needs no launcher."""
        launcher = self.launcher
        if launcher is None:
            launcher = "" if self.table.scale != "paper" else MACHINE if nodes == 1 else CLUSTER
        return shlex.split(launcher.replace("{nodes}", str(nodes)))

    def text(self, words: list[str], nodes: int = 1) -> str:
        """A command as a person would type it."""
        start = self.start(nodes)
        return shlex.join([*start, "-m", "momentum2", *words] if start else ["momentum2", *words])


def commands(work: Work) -> list[str]:
    """Every command of the table, in order, each on one line whatever its paths contain."""
    lines = []
    for run, seed, rows in work.groups():
        lines.append(work.text(work.pretrain(run, seed), work.nodes(run)))
        lines += [work.text(work.evaluate(row, e, seed)) for row in rows for e in row.evaluations]
    return [shown(line, 10_000) for line in lines + _on_detectron2(work)]


def _on_detectron2(work: Work) -> list[str]:
    """The detectors of the table on detectron2 itself, as comments: `reproduce` does not run them."""
    lines = []
    for run, seed, rows in work.groups():
        exported = set()
        for row in rows:
            config, network = row.evaluation.detectron2, row.evaluation.network
            if config is None:
                continue
            source = run.run(work.out, seed)
            folder = work.out / "detectron2" / source.parent.name / source.name / (network or "default")
            if folder not in exported:
                exported.add(folder)
                words = ["--network", network] if network else []
                lines.append(
                    ["momentum2", "export", source, "--format", "detectron2", *words, "--out", folder]
                )
            out, lazy = (
                row.detector(work.out, seed).with_name(f"{seed}-detectron2"),
                config.startswith("fcos"),
            )
            settings: dict[str, object] = {
                "train.seed" if lazy else "SEED": seed,
                "train.output_dir" if lazy else "OUTPUT_DIR": out.as_posix(),
            }
            if row.evaluation.scratch:
                settings["train.init_checkpoint" if lazy else "MODEL.WEIGHTS"] = ""
            if lazy:  # in quotes: Hydra would read the "," and "=" of a path as its own
                words = [f"{name}={_in_quotes(value)}" for name, value in settings.items()]
            else:
                words = [str(word) for pair in settings.items() for word in pair]
            file = folder / "configs" / f"{config}.yaml"
            lines.append(["python", folder / "train.py", "--config-file", file, "--num-gpus", "8", *words])
    head = ["# The same detectors on detectron2 itself, which most published numbers come from:"]
    return (head if lines else []) + ["# " + shlex.join(map(str, line)) for line in lines]


def _in_quotes(value: object) -> str:
    return "'" + value.replace("'", r"\'") + "'" if isinstance(value, str) else str(value)


def reproduce(work: Work, jobs: int) -> str:
    """Run what is not finished yet, `jobs` at a time; returns the table as Markdown.

    Raises:
        Stopped: After SIGTERM or SIGINT; the runs have saved their state.
        UserError: If a command fails; the other rows are run first, and the sentence names its log.
    """
    start = work.start(1)
    if start and shutil.which(start[0]) is None:
        raise SettingError("launcher", f"needs a program called {start[0]}, which does not exist.")
    try:
        work.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            "out", f"{work.out} cannot be created ({error.strerror}). Choose another folder."
        ) from None
    for run, seed, _ in work.groups():
        _check_settings(work, run, seed)
    with _stop_on_signals() as children, ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(_run_group, work, run, seed, rows, children) for run, seed, rows in work.groups()
        ]
        _finish(work, futures, jobs, children)
        if work.processes and "seconds" in work.table.columns:
            _measure_seconds(work, children)
    return write_table(work)


def write_table(work: Work) -> str:
    """Write TABLE.json, TABLE.md and TABLE.png of what is finished; returns the Markdown."""

    def texts(row: Row, seed: int) -> list[str]:
        run = row.pretraining
        evaluations = [work.text(work.evaluate(row, e, seed)) for e in row.evaluations]
        return [work.text(work.pretrain(run, seed), work.nodes(run)), *evaluations]

    seconds = _read_seconds(work) if work.processes else None
    found = collect(work.table, work.out, seconds, texts)
    text, stem = markdown(found), work.out / work.table.stem
    content = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    write_whole(stem.with_suffix(".json"), content.encode())
    if any(row["seeds"] for row in found["rows"]) and not plot(found, stem.with_suffix(".png")):
        text += "\nFor a plot: pip install 'momentum2[reproduce]'.\n"
    write_whole(stem.with_suffix(".md"), text.encode())
    return text


class _Children:
    """The commands that are running."""

    def __init__(self) -> None:
        self.lock, self.processes, self._stopped = threading.Lock(), set[subprocess.Popen[bytes]](), False

    def run(self, words: list[str], log: Path) -> int:
        """Run a command to its end with its output in `log`; returns its exit code."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with append(log) as file:
            with self.lock:
                if self.is_stopped():
                    raise Stopped
                child = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
                self.processes.add(child)
                if self.is_stopped():  # meanwhile
                    child.terminate()
            code = child.wait()
            with self.lock:
                self.processes.discard(child)
        return code

    def is_stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Ask all to save and end, and start no more."""
        self._stopped = True  # first: a signal may come while `run` holds the lock
        for child in list(self.processes):
            child.terminate()


@contextmanager
def _stop_on_signals() -> Iterator[_Children]:
    """The commands, which a signal stops; another thread than the main one cannot handle any."""
    children = _Children()
    if threading.current_thread() is not threading.main_thread():
        yield children
        return

    def handle(number: int, frame: FrameType | None) -> None:
        children.stop()

    stopping = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the terminal may go
        stopping.append(signal.SIGHUP)
    previous = {s: signal.signal(s, handle) for s in stopping}
    try:
        yield children
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _finish(work: Work, futures: list[Future[float]], jobs: int, children: _Children) -> None:
    """Wait for all, with the table up to date. One that fails does not keep the others from their end."""
    waiting, taken, failures = set(futures), list[float](), list[Exception]()
    try:
        while waiting:  # in short turns: signals are handled between them
            done, waiting = wait(waiting, timeout=0.5)
            for future in done:
                try:
                    taken += [future.result()] if future.result() else []
                except (Stopped, UserError) as error:
                    failures.append(error)
            if done:
                write_table(work)
            if done and taken and waiting and not children.is_stopped():
                left = timedelta(seconds=round(fmean(taken) * len(waiting) / jobs))
                finished = f"{len(futures) - len(waiting)} of {len(futures)} runs"
                _say(f"{finished} have ended, about {left} left")
    except BaseException:
        children.stop()  # they come to a checkpoint while the error waits for them
        raise
    if failures:
        # A failure says more than its effect.
        raise min(failures, key=lambda error: isinstance(error, Stopped))


def _run_group(work: Work, run: Pretraining, seed: int, rows: list[Row], children: _Children) -> float:
    """Train and evaluate what is not finished; returns the seconds it took, 0 if there was nothing to do."""
    name, directory = f"{run.name}, seed {seed}", run.run(work.out, seed)
    start, worked = time.monotonic(), False
    if not (directory / ENCODER).exists():
        _say(f"start  {name}  (momentum2 watch {shlex.quote(str(directory))})")
        worked = True
        _command(work, work.pretrain(run, seed), work.nodes(run), directory.with_suffix(".log"), children)
    for row in rows:
        for evaluation in row.evaluations:
            if not is_evaluated(row, evaluation, work.out, seed):
                worked = True
                words = work.evaluate(row, evaluation, seed)
                _command(work, words, 1, directory.with_suffix(".log"), children)
        found = read_outcome(row, work.out, seed)
        if found is None:
            raise UserError(f"{row.label} ended without a result. See {directory.with_suffix('.log')}.")
        numbers = "  ".join(f"{column} {value:.4g}" for column, value in found.numbers.items())
        minutes = f"  in {(time.monotonic() - start) / 60:.1f} min" if worked else "  (finished before)"
        _say(f"done   {row.label}, seed {seed}: {numbers}{minutes}")
    return time.monotonic() - start if worked else 0.0


def _command(work: Work, words: list[str], nodes: int, log: Path, children: _Children) -> None:
    start = work.start(nodes) or [sys.executable]
    before = log.stat().st_size if log.exists() else 0
    code = children.run([*start, "-m", "momentum2", *words], log)
    if code == os.EX_TEMPFAIL or (code and children.is_stopped()):
        raise Stopped
    if code:
        lines = read(log)[before:].decode(errors="replace").splitlines()
        said = [line.removeprefix("momentum2: ") for line in lines if line.startswith("momentum2: ")]
        why = said[-1] if said else f"It ended with code {code}."
        _say(f"failed  {why}  ({log})")
        raise UserError(f"{work.text(words, nodes)} failed: {why} The log is {log}.")


def _check_settings(work: Work, run: Pretraining, seed: int) -> None:
    """Refuse to take a run with other settings, such as an older version's, for this one."""
    directory = run.run(work.out, seed)
    if (directory / CONFIG).exists():
        config = override(find(run.recipe).config, run.settings(seed, work.root))
        check_config(directory, config, idle_settings(config, method_class(config)))


def _measure_seconds(work: Work, children: _Children) -> None:
    """Seconds per iteration of the table's runs, in turns on real processes: what the norms' communication costs."""
    finished: dict[str, Path] = {}  # with any seed: it makes no difference to the time
    for row in work.table.rows:
        seeds = row.pretraining.run(work.out, work.seeds[0]).parent.glob("seed-*")
        if found := sorted(run for run in seeds if (run / ENCODER).exists()):
            finished[row.pretraining.name] = found[0]
    if _read_seconds(work).keys() >= finished.keys():
        return
    _say(f"start  seconds per iteration on {work.processes} processes")
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(work.processes), "-m", "momentum2.reproduce.timing"]
    path = _seconds_file(work)
    log, new = path.with_suffix(".log"), path.with_suffix(".new")
    code = children.run([*words, str(new), *(str(run / CONFIG) for run in finished.values())], log)
    if children.is_stopped():
        raise Stopped
    if code:
        raise UserError(f"Measuring the seconds per iteration failed. The log is {log}.")
    measured = dict(zip(finished, read_json(new), strict=True))  # all of them: turns are compared
    write_whole(path, (json.dumps(measured) + "\n").encode())
    new.unlink()


def _say(text: str) -> None:
    _log.info("%s  %s", time.strftime("%X"), text)


def _seconds_file(work: Work) -> Path:
    return work.out / f"{work.table.stem}.seconds.json"


def _read_seconds(work: Work) -> dict[str, list[float]]:
    """Seconds per iteration, turn by turn, by the name of the pretraining, where they have been measured."""
    path = _seconds_file(work)
    try:
        found = dict(read_json(path)) if path.exists() else {}
        turns = {
            str(name): each for name, each in found.items() if isinstance(each, list)
        }  # not 0.1's medians
        return {name: [float(seconds) for seconds in each] for name, each in turns.items()}
    except (ValueError, TypeError):
        raise UserError(f"{path} is not a file of seconds. Remove it to measure them again.") from None
