"""The report of a run that is still training, served to this machine alone."""

import logging
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from momentum2.errors import SettingError, UserError
from momentum2.files import real
from momentum2.report.html import note, script_json
from momentum2.report.page import curves_data, moving_parts, render
from momentum2.runs.handle import Snapshot, read_run

log = logging.getLogger("momentum2")

#: Seconds between two looks of an open page.
EVERY = 2
#: Requests that are answered at a time; browsers send a few.
AT_A_TIME = 16
#: Seconds that a connection may say nothing.
PATIENCE = 10
_LATER = "momentum2 report RUN shows this; it takes too long to be repeated during training."


def watch(run: Path, port: int = 8010) -> None:
    """Serve a live page about `run` on 127.0.0.1 until Ctrl-C; port 0 picks a free one."""
    with make_server(run, port) as server:
        log.info("Watching %s at http://127.0.0.1:%s/ (press Ctrl-C to stop)", run, server.server_port)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


class _Server(ThreadingHTTPServer):
    """Answers a limited number of requests at a time: whoever comes then is sent away at once."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type["_Handler"]) -> None:
        self._free = threading.Semaphore(AT_A_TIME)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever breaks a connection does not get to fill the terminal."""


def make_server(run: Path, port: int) -> ThreadingHTTPServer:
    """The server, ready to serve."""
    run = real(run)
    read_run(run)  # complains now rather than in the browser

    class Handler(_Handler):
        directory = run

    try:
        return _Server(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise SettingError("port", f"{port} cannot be used ({error}). Choose another.") from None


class _Handler(BaseHTTPRequestHandler):
    directory: Path
    timeout = PATIENCE

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)  # another site's name that was made to point here
            return
        try:
            if url.path == "/":
                self._send("text/html", _page(self.directory))
            elif url.path == "/live.json":
                seen = parse_qs(url.query).get("seen", [""])[0]
                self._send("application/json", _live(self.directory, seen))
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except UserError as error:
            self._send("text/plain", str(error), HTTPStatus.INTERNAL_SERVER_ERROR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the browser has gone

    def _send(self, kind: str, text: str | None, status: HTTPStatus = HTTPStatus.OK) -> None:
        body = (text or "").encode("utf-8", "replace")
        self.send_response(HTTPStatus.NO_CONTENT if text is None else status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line for every look would fill the terminal."""


def _page(directory: Path) -> str:
    stamp, run = _read(directory)
    live = {"live": True, "every": EVERY, "stamp": stamp}
    return render([run], [None], note(_LATER), note(_LATER), [], live)


def _live(directory: Path, seen: str) -> str | None:
    """What is new since the page saw `seen`; None if nothing is."""
    if _stamp(directory) == seen:
        return None
    stamp, run = _read(directory)
    return script_json({**moving_parts([run]), "data": curves_data([run]) | {"stamp": stamp}})


def _read(directory: Path) -> tuple[str, Snapshot]:
    stamp = _stamp(directory)  # taken first: what comes later is seen as new
    return stamp, read_run(directory)


def _stamp(directory: Path) -> str:
    """Text that changes whenever the run has written something."""
    stats = [path.stat() for path in sorted(directory.iterdir()) if path.is_file()]
    return "-".join(f"{stat.st_mtime_ns}.{stat.st_size}" for stat in stats)
