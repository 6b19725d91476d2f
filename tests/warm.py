"""A Python that has imported torch already, for tests that need processes of their own.

Importing torch takes some seconds of a core, in every process that is started. Here a server imports it once, and each
process is a fork of the server. The fixture `warm_python` gives a program that is used in place of `sys.executable`:

    python [-u] (-m MODULE | -c CODE | - | FILE) [ARGUMENTS]

It takes its arguments, environment, working directory, input and output as `python` does, passes signals on, and ends
with the same exit code or by the same signal. If it is killed, its fork is killed too. What a fork starts in turn
(torchrun its processes, `momentum2 reproduce` its commands) is as warm.

Forking is safe because the server has one thread and computes nothing. It does not import momentum2, so that every
process shows again that momentum2 imports what it needs; tests/test_docs.py runs each command in a fresh one too.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTED = ("torch", "torch._dynamo", "rich.progress", "yaml", "PIL.Image")  # dynamo: by the first optimizer
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def import_all() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    threads = Path("/proc/self/task")
    assert not threads.exists() or len(list(threads.iterdir())) == 1, "A fork has only one of them."
    gc.collect()
    gc.freeze()  # or a fork would copy the memory of all these objects when it looks for garbage


def serve(address: str, executable: str) -> dict[str, Any] | None:
    """Fork for each client until the input ends. Returns None then, but in the forks what they are to run."""
    sys.path.pop(0)  # the folder of this file
    import_all()
    sys.executable = os.environ["PYTHON_EXEC"] = executable  # what torchrun and `momentum2 reproduce` start
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(100)
        print("ready", flush=True)
        keepers: set[int] = set()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            keepers = {keeper for keeper in keepers if os.waitpid(keeper, os.WNOHANG) == (0, 0)}
            keeper = os.fork()
            if keeper == 0:
                listener.close()
                return keep(connection)
            keepers.add(keeper)
            connection.close()
    for keeper in keepers:
        os.waitpid(keeper, 0)
    return None


def keep(connection: socket.socket) -> dict[str, Any]:
    """Fork what a client asks for, tell it the process and how that ended; end it if the client is gone."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("r") as lines:
        request: dict[str, Any] = json.loads(lines.readline())
    program = os.fork()
    if program == 0:
        connection.close()
        return request | {"files": files}
    for file in files:
        os.close(file)

    ended = threading.Event()

    def end_with_the_client() -> None:
        if not connection.recv(1) and not ended.is_set():
            os.kill(program, signal.SIGKILL)

    threading.Thread(target=end_with_the_client, daemon=True).start()
    with contextlib.suppress(BrokenPipeError):  # the client is gone
        connection.sendall(f"{program}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    ended.set()
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def run(request: dict[str, Any]) -> None:
    """Be the Python that was asked for."""
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["directory"])
    ours = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "PYTHON_EXEC")}
    os.environ.clear()
    os.environ.update(ours | request["environment"])
    what, *words = request["arguments"]
    if what == "-u":
        sys.stdout.reconfigure(write_through=True)
        what, *words = words
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in path if place and place not in sys.path]
    if what == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    elif what in ("-c", "-"):
        sys.path.insert(0, "")
        code, sys.argv = (words[0], ["-c", *words[1:]]) if what == "-c" else (sys.stdin.read(), ["-", *words])
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, str(Path(what).parent.resolve()))
        sys.argv = [what, *words]
        runpy.run_path(what, run_name="__main__")


def ask(address: str, arguments: list[str]) -> int:
    """Have a fork of the server run `arguments`, and end as it does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"f"], [0, 1, 2])
        request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
        server.sendall(json.dumps(request).encode() + b"\n")
        with server.makefile("r") as lines:
            program = int(lines.readline())
            for number in PASSED_ON:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, lambda number, frame: os.kill(program, number))
            code = int(lines.readline())
    if code >= 0:
        return code
    if -code in PASSED_ON:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 1  # not reached


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    wanted = serve(sys.argv[2], sys.argv[3])
    if wanted is not None:
        run(wanted)
