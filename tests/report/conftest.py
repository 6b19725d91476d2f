"""A real browser, driven over its debugging pipe, and tiny runs to look at."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from momentum2.api import pretrain
from momentum2.config import Config, DataConfig, MethodConfig, ModelConfig, MonitorConfig, TrainConfig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 600  # seconds, after which the browser is taken for broken, however busy the machine


class Browser:
    """Headless Chromium. `problems` and `requests` are what its console and network said since `open`."""

    def __init__(self, profile: Path) -> None:
        from_us, to_browser = os.pipe()
        self.answers, from_browser = os.pipe()
        self.commands = to_browser
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        flags += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "--disable-background-networking"]
        # Chromium reads commands from descriptor 3 and answers on 4.
        script = f'exec "$0" "$@" 3<&{from_us} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, str(CHROMIUM), *flags, "about:blank"],
            pass_fds=(from_us, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(from_browser)
        self.buffer, self.count, self.session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self.commands)
        os.close(self.answers)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        while True:
            answer = self._next(PATIENCE)
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self, timeout: float) -> dict[str, Any]:
        end = time.monotonic() + timeout
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self.answers, 1 << 20)
            assert data, "the browser has ended"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value")) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            ("data:", "blob:")
        ):
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(
        self, url: str, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False
    ) -> float:
        """Load a page; returns the seconds until it was drawn, by the browser's own clock."""
        self._navigate("about:blank")  # the page before may still be asking its server for news
        self.problems.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._navigate(url)
        drawn = "requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000)))"
        return float(self.run(f"new Promise((done) => {drawn})"))

    def _navigate(self, url: str) -> None:
        self.loaded = False
        self.call("Page.navigate", url=url)
        while not self.loaded:
            self._next(PATIENCE)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = PATIENCE) -> Any:
        """Wait for an expression to be true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.1)
        return value

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, path: Path, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(
            "no chromium on this machine: the page is not looked at (Debian: apt-get install chromium)"
        )
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


HOSTILE_CLASSES = ["</script><script>boom()</script>", "<img src=x onerror=boom()>", "a & b"]
HOSTILE_FILE = "<img src=y onerror=boom()> {i}.png"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on pictures whose files, classes and directory have names that are HTML."""
    home = tmp_path_factory.mktemp("home")
    colors = np.random.default_rng(0).integers(0, 256, (3, 3))
    for split, count in (("train", 24), ("test", 30)):
        lines = []
        (home / "data" / split).mkdir(parents=True)
        for i in range(count):
            noise = np.random.default_rng(i).integers(0, 60, (16, 16, 3))
            pixels = np.clip(colors[i % 3] + noise, 0, 255).astype(np.uint8)
            name = f"{split}/{HOSTILE_FILE.format(i=i)}"
            Image.fromarray(pixels).save(home / "data" / name)
            lines.append(f"{name}\t{HOSTILE_CLASSES[i % 3]}\n")
        (home / "data" / f"{split}.txt").write_text("".join(lines))
    data = DataConfig("list", str(home / "data"), image_size=16, cache="off")
    config = Config(
        method=MethodConfig("byol"),
        model=ModelConfig("resnet18", "small", 0.125, projector_hidden=16, projector_out=8),
        data=data,
        eval_data=data,
        train=TrainConfig(steps=4, batch_size=8, threads=1, device="cpu", precision="fp32"),
        monitor=MonitorConfig(log_every=1, knn_every=1, knn_k=5, report=False),
    )
    out = home / "run <b>"
    assert pretrain(config, out).finished
    return out
