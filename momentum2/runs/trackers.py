"""TensorBoard, Weights & Biases and MLflow as readers of `metrics.jsonl`: in a process of their own, or afterwards.

The file is the truth, and the same code sends it while a run trains, after a kill, and later. What was sent is written
down beside it, so each record is sent once; a kill in between may repeat the last few, with the same steps and values.
Training writes to the file and to nothing else: a tracker that hangs or fails cannot slow or stop it.
"""

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, get_args

from momentum2.config import MonitorConfig, Tracker
from momentum2.errors import UserError, reason, shown
from momentum2.files import locked, open_regular, read_json, real, write_whole
from momentum2.runs.handle import Run, check_run
from momentum2.runs.metrics import parse_record
from momentum2.runs.names import CONFIG, METRICS, MLRUNS, TENSORBOARD, TRACKER
from momentum2.yaml_settings import read_settings

_EVERY = 1.0  # seconds between two looks at the file
_PATIENCE = 10.0  # seconds that the end of a training waits for its followers
_GRACE = 300.0  # seconds that a follower has after its training is gone
_BATCH = 64  # records after which what was sent is written down

Record = dict[str, float]


class Sink(Protocol):
    """A tracker, opened for one run."""

    def send(self, step: int, values: Record) -> None: ...

    def flush(self) -> None:
        """Return when all that was sent is safe."""

    def close(self, finished: bool) -> None: ...


# -- the three


class TensorBoard:
    """Events in the folder `tensorboard` of the run."""

    def __init__(self, run: Path, name: str, state: dict[str, Any], settings: dict[str, object]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        folder = run / TENSORBOARD
        known = folder.is_dir() and any(folder.iterdir())
        self.writer = EventFileWriter(str(folder))
        if known and not state["sent"]:  # a version that kept no account wrote them; all come again
            started = SessionLog(status=SessionLog.START)
            self.writer.add_event(Event(wall_time=time.time(), step=0, session_log=started))

    def send(self, step: int, values: Record) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars))
        self.writer.add_event(event)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases; its own variables (WANDB_MODE, WANDB_PROJECT ...) say where and how."""

    def __init__(self, run: Path, name: str, state: dict[str, Any], settings: dict[str, object]) -> None:
        import wandb

        state.setdefault("id", secrets.token_hex(4))
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "momentum2"),
            id=state["id"],
            name=name,
            dir=str(run),
            resume="allow",
            config=settings,
            settings=wandb.Settings(console="off", silent=True, disable_code=True, disable_git=True),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # W&B's own steps never go back, ours do after a kill

    def send(self, step: int, values: Record) -> None:
        self.run.log({"step": step, **values})

    def flush(self) -> None:
        """W&B writes its own file before it sends anything, in a process that outlives us."""

    def close(self, finished: bool) -> None:
        self.run.finish()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or, if that is not set, in the folder `mlruns` of the run."""

    def __init__(self, run: Path, name: str, state: dict[str, Any], settings: dict[str, object]) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:
            # Newer versions of MLflow ask for this word before they write files.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        place = os.environ.get("MLFLOW_TRACKING_URI") or real(run / MLRUNS).as_uri()
        self.client = MlflowClient(tracking_uri=place)
        if "id" not in state:
            title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "momentum2")
            found = self.client.get_experiment_by_name(title)
            experiment = found.experiment_id if found else self.client.create_experiment(title)
            state["id"] = self.client.create_run(experiment, run_name=name).info.run_id
            params = [Param(key, str(value)[:500]) for key, value in settings.items()]
            for start in range(0, len(params), 100):
                self.client.log_batch(state["id"], params=params[start : start + 100])
        self.id = state["id"]
        self.client.update_run(self.id, status="RUNNING")

    def send(self, step: int, values: Record) -> None:
        now = int(time.time() * 1000)
        self.client.log_batch(self.id, [self._metric(name, v, now, step) for name, v in values.items()])

    def flush(self) -> None:
        """Each batch is safe when it returns."""

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


_SINKS: dict[str, type[TensorBoard] | type[WandB] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


def check_installed(to: str) -> None:
    """Raise a `UserError` for a tracker that there is not, or whose package is not installed."""
    if to not in get_args(Tracker):
        raise UserError(
            f"There is no tracker called {shown(to)}. Choose from {', '.join(get_args(Tracker))}."
        )
    if not _is_installed(to):
        name = {"tensorboard": "TensorBoard", "wandb": "wandb", "mlflow": "MLflow"}[to]
        raise UserError(f"{name} is not installed. Run pip install 'momentum2[{to}]'.")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# -- the follower


_LONGEST_LINE = 1 << 20  # bytes


class _Tail:
    """New whole lines of a file that grows, and is replaced when a run resumes."""

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.offset = path, -1, 0
        self.counts: dict[int, int] = {}

    def read(self) -> Iterator[tuple[list[int], Record]]:
        """[step, number among the records of that step] and the values of each new record that has some."""
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            number = os.fstat(file.fileno()).st_ino
            if number != self.file or os.fstat(file.fileno()).st_size < self.offset:
                self.file, self.offset = number, 0
                self.counts.clear()
            file.seek(self.offset)
            while line := file.readline(_LONGEST_LINE):
                while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    line = file.readline(_LONGEST_LINE)  # no line of ours: its last part is no record
                if not line.endswith(b"\n"):
                    return  # it is being written
                self.offset = file.tell()
                record = parse_record(line.decode(errors="replace"))
                if record is None or "alarm" in record:
                    continue
                step = record.pop("step")
                place = [step, self.counts.get(step, 0)]
                self.counts[step] = place[1] + 1
                yield place, record


def follow(run: Path, to: str, ended: threading.Event | None = None) -> int:
    """Send what `metrics.jsonl` has and was not sent yet; returns how many records that was.

    Args:
        run: The run directory.
        to: The tracker.
        ended: Go on until this is set; by default, until all that is there now is sent.
    """
    path = run / f"{TRACKER}{to}.json"
    state, tail, sink, count, unkept = _state(path), _Tail(run / METRICS), None, 0, 0
    try:
        while True:
            last = ended is None or ended.is_set()  # asked first: what was written before it is read below
            for place, values in tail.read():
                if place <= state["sent"]:
                    continue
                if sink is None:
                    sink = _open(run, to, path, state)
                sink.send(place[0], values)
                state["sent"], count, unkept = place, count + 1, unkept + 1
                if unkept >= _BATCH:
                    unkept = _keep(path, state, sink)
            if sink is not None and unkept:
                unkept = _keep(path, state, sink)
            if last:
                return count
            assert ended is not None
            ended.wait(_EVERY)
    finally:
        if sink is not None:
            sink.close(Run(run).finished)


def _open(run: Path, to: str, path: Path, state: dict[str, Any]) -> Sink:
    sink: Sink = _SINKS[to](run, real(run).name, state, read_settings(run / CONFIG))
    write_whole(path, json.dumps(state).encode())  # its name there is known from now on
    return sink


def _keep(path: Path, state: dict[str, Any], sink: Sink) -> int:
    """Write down what was sent; returns 0, the number of records since."""
    sink.flush()
    write_whole(path, json.dumps(state).encode())
    return 0


def _state(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        found = None
    sent = found.get("sent") if isinstance(found, dict) else None
    if not isinstance(sent, list) or not all(type(n) is int for n in sent):
        return {"sent": []}
    known = (
        found["id"] if isinstance(found.get("id"), str) and re.fullmatch(r"\w{1,64}", found["id"]) else None
    )
    return {"sent": sent} | ({"id": known} if known else {})


def send(run: Path, to: str) -> int:
    """Send what a run logged and a tracker does not have yet; returns the number of records."""
    check_installed(to)
    check_run(run)
    try:
        with locked(run / f".{TRACKER}{to}.lock", wait=False):
            return follow(run, to)
    except BlockingIOError:
        raise UserError(f"{run} is being sent to {to} by another process. Wait until it finishes.") from None
    except UserError:
        raise
    except Exception as error:  # whatever the tracker raises
        raise UserError(
            f"{to} did not accept everything ({reason(error)}). Run the same command again later."
        ) from None


def live() -> None:
    """Be the process that follows a run: its first line of input says which, and at the end of the input it ends."""
    job = json.loads(sys.stdin.buffer.readline())
    run, to = Path(job["run"]), str(job["to"])
    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()  # the training closes it, or is gone
        ended.set()
        time.sleep(_GRACE)
        os._exit(1)  # the tracker hangs

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        with locked(run / f".{TRACKER}{to}.lock"):  # the follower of a killed training may still be at work
            follow(run, to, ended)
    except Exception as error:
        sys.stdout.write(reason(error))
        sys.stdout.flush()
        os._exit(1)  # not to wait for threads of the tracker


class Follower:
    """A process that sends what a run logs to a tracker."""

    def __init__(self, run: Path, to: Tracker) -> None:
        self.to = to
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from momentum2.runs.trackers import live; live()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for the training, which then ends it
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"run": str(real(run)), "to": to}).encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> str | None:
        """Have it send the rest; a sentence if it did not, or is still at it after some seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            code = self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.stdout.close()
            return f"{self.to} is still being sent the last records, by process {self.process.pid}."
        why = self.process.stdout.read(2_000).decode(errors="replace")
        self.process.stdout.close()
        if code == 0:
            return None
        return (
            f"{self.to} did not accept everything ({shown(why) or code}). Send the rest with momentum2 log."
        )


def wanted(monitor: MonitorConfig) -> list[Tracker]:
    """The trackers that a run asks for."""
    return [name for name in get_args(Tracker) if getattr(monitor, name)]
