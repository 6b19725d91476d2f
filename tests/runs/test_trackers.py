"""Trackers: the real packages, offline; followers that are killed, hang or fail."""

import json
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import momentum2 as m2
from momentum2.cli.main import main
from momentum2.runs import trackers
from momentum2.runs.metrics import keep_until, read_metrics
from momentum2.runs.trackers import Follower, send


@pytest.fixture
def run(tmp_path: Path) -> Path:
    place = tmp_path / "photos"
    place.mkdir()
    (place / "config.yaml").write_text("train: {steps: 60, seed: 3}\noptim: {lr: 0.25}\n")
    return place


def line(step: int, **values: float | str) -> str:
    return json.dumps({"step": step, **values}) + "\n"


def write(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def lines_of(steps: range) -> list[str]:
    """As a run logs them: a loss at each step, now and then kNN at the same step, and an alarm."""
    found = []
    for step in steps:
        found.append(line(step, loss=1 / (1 + step), lr=0.25))
        if step % 3 == 0:
            found.append(line(step, knn_top1=float(step)))
        if step % 5 == 0:
            found.append(line(step, alarm="Look here."))
    return found


def expected(run: Path) -> dict[tuple[int, str], float]:
    records = [r for r in read_metrics(run / "metrics.jsonl") if "alarm" not in r]
    return {(r["step"], name): value for r in records for name, value in r.items() if name != "step"}


def events(run: Path) -> list[tuple[int, str, float]]:
    """All scalars in the event files, in the order of these."""
    found = []
    for file in sorted((run / "tensorboard").iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                number = value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
                found.append((event.step, value.tag, number))
    return found


def sent(run: Path, tracker: str = "tensorboard") -> list[int]:
    try:
        return json.loads((run / f"tracker-{tracker}.json").read_text())["sent"]
    except FileNotFoundError:
        return []


def wait_until(run: Path, place: list[int], follower: Follower) -> None:
    while sent(run) < place:
        assert follower.process.poll() is None
        time.sleep(0.01)


def test_what_is_there_is_sent_once(run: Path, capsys: pytest.CaptureFixture[str]):
    write(run, "".join(lines_of(range(7))) + '{"step": 7, "lo')  # the last line is being written
    assert main(["log", str(run), "--to", "tensorboard"]) == 0
    assert main(["log", str(run), "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Sent 10 records to tensorboard.",
        "tensorboard has everything already.",
    ]
    assert {(step, name): value for step, name, value in events(run)} == pytest.approx(expected(run))
    assert len(events(run)) == len(expected(run))
    write(run, 'ss": 0.5}\n' + line(8, loss=0.25))
    assert m2.log_run(run, "tensorboard") == 2
    assert {(step, name): value for step, name, value in events(run)} == pytest.approx(expected(run))
    assert len(events(run)) == len(expected(run))


def test_followers_that_are_killed_at_random(run: Path):
    """Training and follower are killed; the run resumes at a checkpoint and logs some steps again."""
    rng = random.Random(0)
    step = kills = 0
    while step < 40:
        start = rng.randrange(max(0, step - 4), step + 1)
        keep_until(run / "metrics.jsonl", start)
        follower = Follower(run, "tensorboard")
        until = start + rng.randrange(5, 20)
        for text in lines_of(range(start + 1 if start else 0, until + 1)):
            write(run, text)
        wait_until(run, [rng.randrange(start, until + 1), 0], follower)
        follower.process.kill()
        follower.process.communicate()
        step, kills = until, kills + 1
    assert kills >= 2
    send(run, "tensorboard")
    found, wanted = Counter((step, name) for step, name, _ in events(run)), expected(run)
    assert {(step, name): value for step, name, value in events(run)} == pytest.approx(wanted)
    assert all(value == pytest.approx(wanted[step, name]) for step, name, value in events(run))
    repeated = sum(count - 1 for count in found.values())
    assert repeated <= kills * 64 * 2  # a batch, of up to two values each


def test_a_follower_ends_with_its_training(run: Path):
    write(run, line(1, loss=1.0))
    follower = Follower(run, "tensorboard")
    wait_until(run, [1, 0], follower)
    write(run, line(2, loss=0.5))
    assert follower.end() is None
    assert sent(run) == [2, 0]
    assert [step for step, _, _ in events(run)] == [1, 2]


def test_events_of_a_version_that_kept_no_account_come_again(run: Path):
    """The first new event tells TensorBoard to forget what it has from its step on."""
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "events.out.tfevents.0.old").touch()
    write(run, line(1, loss=1.0))
    send(run, "tensorboard")
    (new,) = (f for f in (run / "tensorboard").iterdir() if not f.name.endswith("old"))
    starts = [e for e in EventFileLoader(str(new)).Load() if e.HasField("session_log")]
    assert [(e.step, e.session_log.status) for e in starts] == [(0, 1)]


# -- trackers that misbehave; no real one can be made to


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(
        f"import time\n\n\ndef init(**settings):\n    {body}\n\n\nSettings = dict\n"
    )
    monkeypatch.setattr(trackers, "_is_installed", lambda name: True)
    root = Path(trackers.__file__).parents[2]
    real = trackers.subprocess.Popen

    def popen(
        *args: Any, env: dict[str, str], **rest: Any
    ) -> Any:  # the fake before anything that is installed
        return real(*args, env=env | {"PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{root}"}, **rest)

    monkeypatch.setattr(trackers.subprocess, "Popen", popen)


TINY = {
    "model": {"width": 0.125, "projector_hidden": 16, "projector_out": 8},
    "data.train_size": 32,
    "data.cache": "off",
    "train.steps": 2,
    "train.batch_size": 8,
    "train.threads": 1,
    "train.device": "cpu",
    "monitor": {"log_every": 1, "report": False, "knn_every": 0, "wandb": True},
}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Follower]]:
    """The followers that a test started, which are gone after it."""
    started: list[Follower] = []
    make = Follower.__init__

    def init(self: Follower, *args: Any) -> None:
        make(self, *args)
        started.append(self)

    monkeypatch.setattr(Follower, "__init__", init)
    yield started
    for follower in started:
        follower.process.kill()
        follower.process.wait()


def test_a_tracker_that_hangs_does_not_stop_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: list[Follower],
    caplog: pytest.LogCaptureFixture,
):
    fake(tmp_path, monkeypatch, "time.sleep(10_000)")
    monkeypatch.setattr(trackers, "_PATIENCE", 0.1)
    assert m2.pretrain(m2.recipe("quickstart", TINY), tmp_path / "run").finished
    assert [record["step"] for record in m2.Run(tmp_path / "run").metrics()] == [1, 2]
    assert "wandb is still being sent the last records, by process" in caplog.text
    (follower,) = ended
    assert follower.process.poll() is None  # it has some minutes of its own


def test_a_tracker_that_fails_is_named_at_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: list[Follower],
    caplog: pytest.LogCaptureFixture,
):
    fake(tmp_path, monkeypatch, "raise ConnectionError('no \\x1b[31m network')")
    monkeypatch.setattr(trackers, "_PATIENCE", 3600.0)  # it ends by itself
    assert m2.pretrain(m2.recipe("quickstart", TINY), tmp_path / "run").finished
    assert r"wandb did not accept everything (ConnectionError: no \x1b[31m network)." in caplog.text


def test_a_follower_whose_tracker_hangs_is_gone_after_its_grace(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Follower]
):
    mark = tmp_path / "hangs"
    short = "from momentum2.runs import trackers; trackers._GRACE = 0.1; "
    fake(tmp_path, monkeypatch, f"{short}open({str(mark)!r}, 'w').close(); time.sleep(10_000)")
    monkeypatch.setattr(trackers, "_PATIENCE", 3600.0)
    write(run, line(1, loss=1.0))
    follower = Follower(run, "wandb")
    while not mark.exists():
        assert follower.process.poll() is None
        time.sleep(0.01)
    assert "wandb did not accept everything" in (follower.end() or "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["RUN"], "Choose where to send it with --to"),
        (["RUN", "--to", "excel"], "--to takes tensorboard, wandb, mlflow"),
        (["RUN/none", "--to", "tensorboard"], "is not a run directory"),
    ],
)
def test_mistakes(run: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    assert main(["log", *(word.replace("RUN", str(run)) for word in words)]) == 2
    assert sentence in capsys.readouterr().err


def test_what_is_not_installed_is_one_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(trackers, "_is_installed", lambda name: False)
    assert main(["log", str(run), "--to", "mlflow"]) == 2
    assert "MLflow is not installed. Run pip install 'momentum2[mlflow]'." in capsys.readouterr().err
    with pytest.raises(m2.UserError, match="wandb is not installed"):
        m2.pretrain(m2.recipe("quickstart", TINY), tmp_path / "new")


def test_one_at_a_time(run: Path):
    from momentum2.files import locked

    with locked(run / ".tracker-tensorboard.lock"), pytest.raises(m2.UserError, match="by another process"):
        send(run, "tensorboard")


def test_a_state_that_is_none_is_as_nothing_sent(run: Path):
    write(run, line(1, loss=1.0))
    for text in ("", "[]", '{"sent": "x"}', '{"sent": [1, {}]}'):
        (run / "tracker-tensorboard.json").write_text(text)
        assert send(run, "tensorboard") == 1


# -- the real packages, offline


def test_mlflow(run: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("mlflow", reason="needs the mlflow extra")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(run, "".join(lines_of(range(4))))
    assert send(run, "mlflow") == 6
    write(run, line(4, loss=0.1))
    assert send(run, "mlflow") == 1
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("momentum2")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "photos"
    assert found.data.params["optim.lr"] == "0.25"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [
        (s, v) for (s, n), v in expected(run).items() if n == "loss"
    ]


def test_wandb(run: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb", reason="needs the wandb extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(run, "".join(lines_of(range(4))))
    assert send(run, "wandb") == 6
    write(run, line(4, loss=0.1))
    assert send(run, "wandb") == 1
    wandb.teardown()  # ends the process that writes its files, which may be behind
    identity = json.loads((run / "tracker-wandb.json").read_text())["id"]
    folders = [f for f in (run / "wandb").iterdir() if f.name.startswith("offline-run")]
    assert all(
        identity in f.name.split("-") for f in folders
    )  # a number follows where two begin in one second
    found = {}
    for folder in folders:
        for row in history(next(folder.glob("*.wandb"))):
            step = int(row.pop("step"))
            found |= {(step, name): v for name, v in row.items() if not name.startswith("_")}
    assert found == pytest.approx(expected(run))


def history(path: Path) -> Iterator[dict[str, float]]:
    """The rows in a file of W&B's: LevelDB's log format (blocks of 32 KiB, records whole or in parts) of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""  # after W&B's own header
    while place + 7 <= len(data):
        if 32_768 - place % 32_768 < 7:  # no room for a header: padding
            place += 32_768 - place % 32_768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record.FromString(parts), b""
            if record.HasField("history"):
                yield {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
