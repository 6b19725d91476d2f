"""`watch`: a real server in a process of its own."""

import importlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from momentum2.errors import UserError
from momentum2.report import watch

# Where the tests run in the background, SIGINT is ignored, and children inherit that.
CODE = """
import signal, sys
from momentum2.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["watch", sys.argv[1], "--port", "0"]))
"""


@pytest.fixture(scope="module")
def training(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is still going on."""
    out = tmp_path_factory.mktemp("watch") / "run"
    shutil.copytree(run, out)
    (out / "encoder.safetensors").unlink()
    return out


@pytest.fixture(scope="module")
def server(training: Path) -> Iterator[tuple[str, Path]]:
    command = [sys.executable, "-c", CODE, str(training)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split(" at ")[1].split()[0]
        try:
            yield address, training
            process.send_signal(signal.SIGINT)
            assert process.wait(600) == 0  # Ctrl-C is how it ends, and no failure
        finally:
            process.kill()


def get(address: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def log(run: Path, record: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_it_says_only_what_is_new(server: tuple[str, Path]):
    address, training = server
    status, text = get(address + "live.json")
    assert status == 200
    stamp = json.loads(text)["data"]["stamp"]
    assert get(f"{address}live.json?seen={stamp}") == (204, "")
    log(training, {"step": 5, "loss": 0.125, "step_time": 1.0})
    status, text = get(f"{address}live.json?seen={stamp}")
    assert status == 200
    assert json.loads(text)["data"]["runs"][0]["series"]["loss"]["value"][-1] == 0.125
    assert "0.125" in json.loads(text)["headline"]


def test_it_serves_this_machine_alone(server: tuple[str, Path]):
    address, _ = server
    assert address.startswith("http://127.0.0.1:")
    assert get(address, Host="evil.example")[0] == 403
    assert get(address + "../../etc/passwd")[0] == 404
    port = int(address.rstrip("/").rsplit(":", 1)[1])
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.2", port), timeout=600):
        pass


def test_mistakes_are_sentences(server: tuple[str, Path], tmp_path: Path):
    address, training = server
    port = int(address.rstrip("/").rsplit(":", 1)[1])
    with pytest.raises(UserError, match=f"^port {port} cannot be used"):
        watch(training, port)
    with pytest.raises(UserError, match="cannot be used"):
        watch(training, 70_000)
    with pytest.raises(UserError, match=r"has no config\.yaml"):
        watch(tmp_path, 0)


def test_silent_visitors_are_few_and_sent_away(training: Path, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module("momentum2.report.watch")
    monkeypatch.setattr(module._Handler, "timeout", 0.5)
    before = threading.active_count()
    with module.make_server(training, 0) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        visitors = []
        for _ in range(module.AT_A_TIME + 20):
            visitors.append(socket.create_connection(("127.0.0.1", server.server_port), timeout=600))
            visitors[-1].sendall(b"GET / HTTP/1.0\r\nHost: ")  # and nothing more
        assert threading.active_count() <= before + 1 + module.AT_A_TIME
        assert [visitor.recv(100) for visitor in visitors] == [b""] * len(visitors)  # closed, sooner or later
        address = f"http://127.0.0.1:{server.server_port}/live.json"
        assert get(address)[0] == 200
        server.shutdown()
        serving.join()
        for visitor in visitors:
            visitor.close()


@pytest.mark.slow
def test_the_page_refreshes_itself(server: tuple[str, Path], browser: Any):
    address, training = server
    browser.open(address)
    assert "step" in browser.run("document.querySelector('#headline dd').textContent")
    log(training, {"step": 6, "loss": 0.0625, "step_time": 1.0})
    log(training, {"step": 6, "alarm": "Step 6: <b>something</b> is wrong."})
    browser.until("document.getElementById('alarms').textContent.includes('<b>something</b>')")
    assert browser.run("DATA.runs[0].series.loss.value").pop() == 0.0625
    drawn = "document.querySelector('#curves-plot path.curve').getAttribute('d').split('L').length"
    assert browser.run(drawn) == browser.run("DATA.runs[0].series.loss.value.length")
    assert browser.run("document.querySelectorAll('main b').length") == 0
    assert browser.problems == []
