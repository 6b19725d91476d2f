"""Shards behind a web address: fetched whole and once, in spite of delays and errors; a change is noticed."""

import http.server
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from forms import write_shards

from momentum2.config import DataConfig
from momentum2.data import open_dataset, remote
from momentum2.errors import SettingError, UserError

ROOT = Path(__file__).parents[2]


class Server(http.server.ThreadingHTTPServer):
    """Files of a folder, with faults: `fail[path]` requests of a file are answered by an error, or cut short."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.delay = folder, 0.0
        self.fail: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        name = self.path.removeprefix("/")
        file = self.server.folder / name
        if not file.is_file():
            self.send_error(404)
            return
        if body:
            time.sleep(self.server.delay)
            if self.server.fail[name] > 0:
                self.server.fail[name] -= 1
                self.send_error(503)
                return
        data = file.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{file.stat().st_mtime_ns}"')
        self.end_headers()
        if body and self.server.cut[name] > 0:
            self.server.cut[name] -= 1
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif body:
            self.wfile.write(data)
            self.server.sent[name] += 1

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(make_folder: Callable[..., Path], tmp_path: Path) -> Iterator[Server]:
    write_shards(make_folder(24, classes=3), tmp_path / "web", 4)
    with Server(tmp_path / "web") as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def opened(server: Server, pattern: str = "data-{000..003}.tar", **more: object) -> np.ndarray:
    dataset = open_dataset(DataConfig("shards", f"{server.address}/{pattern}", cache="off", **more))
    assert len(dataset) == 24
    return np.concatenate([dataset.picture(i).pixels().ravel() for i in range(24)])


def test_shards_are_fetched_once_and_are_those_of_the_disk(server: Server) -> None:
    here = open_dataset(DataConfig("shards", str(server.folder), cache="off"))
    pixels = np.concatenate([here.picture(i).pixels().ravel() for i in range(24)])
    np.testing.assert_array_equal(opened(server), pixels)
    np.testing.assert_array_equal(opened(server), pixels)
    assert server.sent == {f"data-00{i}.tar": 1 for i in range(4)}
    there = open_dataset(DataConfig("shards", f"{server.address}/data-{{000..003}}.tar", cache="off"))
    assert list(there.names) == list(here.names)  # so that a run can be resumed on a copy


def test_errors_and_cut_transfers_are_tried_again(server: Server, own_cache: Path) -> None:
    server.fail["data-001.tar"] = 2
    server.cut["data-002.tar"] = 1
    opened(server)
    assert not list(own_cache.rglob(".tmp-*"))
    server.fail["data-003.tar"] = 100
    os.utime(server.folder / "data-003.tar")  # another version
    with pytest.raises(UserError, match=r"data-003.tar could not be fetched .* Run the same command again"):
        opened(server)
    assert server.sent["data-000.tar"] == 1


def test_a_changed_file_is_fetched_anew(server: Server) -> None:
    before = opened(server)
    os.utime(server.folder / "data-001.tar", ns=(1, 1))
    np.testing.assert_array_equal(opened(server), before)
    assert server.sent["data-001.tar"] == 2
    assert server.sent["data-000.tar"] == 1


def test_what_cannot_be_fetched_is_a_sentence(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=r"data-004.tar does not exist"):
        opened(server, "data-{000..004}.tar")
    with pytest.raises(SettingError, match=r"is a URL, which the data set .folder. cannot read"):
        open_dataset(DataConfig("folder", f"{server.address}/photos"))
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(SettingError, match=r"has 0.0 GB free, but .* must be downloaded") as caught:
        opened(server)
    assert caught.value.setting == "data.cache_dir"
    assert not server.sent
    with pytest.raises(UserError, match="fsspec cannot read abfs"):
        open_dataset(DataConfig("shards", "abfs://container/a.tar"))


@pytest.mark.slow
def test_a_run_is_killed_while_it_fetches_and_resumed_by_two_processes(
    server: Server, tmp_path: Path, own_cache: Path, warm_python: str
) -> None:
    """Two processes of one machine fetch each shard once, and compute what they compute from the disk."""
    import safetensors.torch
    import torch

    fixed = "--model.width 0.125 --model.projector_hidden 16 --data.image_size 16 --data.cache off --data.name shards "
    fixed += "--train.batch_size 8 --train.steps 4 --train.devices 2 --train.threads 1 --train.device cpu "
    fixed += "--train.checkpoint_every 2 --eval_data.name none --monitor.report false"

    def command(out: str, root: str, processes: int) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
        words = ["-m", "momentum2", "pretrain", "quickstart", *fixed.split(), "--data.root", root]
        return [warm_python, *(torchrun if processes > 1 else []), *words, "--out", str(tmp_path / out)]

    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHON_EXEC=warm_python)
    url = f"{server.address}/data-{{000..003}}.tar"
    server.delay = 1.0
    with subprocess.Popen(command("remote", url, 1), env=environment, stderr=subprocess.PIPE) as killed:
        while not list(own_cache.rglob(".tmp-*")) and killed.poll() is None:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    server.delay = 0.0
    for out, root, processes in (("remote", url, 2), ("disk", str(server.folder), 2)):
        done = subprocess.run(command(out, root, processes), env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert all(
        count == 1 or count == 2 for count in server.sent.values()
    )  # once, and at most once for the killed
    runs = [safetensors.torch.load_file(tmp_path / out / "encoder.safetensors") for out in ("remote", "disk")]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert server.address in (tmp_path / "remote" / "config.yaml").read_text()
