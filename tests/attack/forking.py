"""The process that attack cases are forked from: it has imported everything, and measures what its forks do.

It is a program that reads one request per line and answers each with one line of facts, both JSON. A fork gets back
what importing changed of Python's defaults, a session of its own, and the current folder first on `sys.path`, as with
`python -m momentum2`. A hang is judged by idleness (nothing runnable, no CPU time spent), slowness by CPU time: on a
shared machine the clock says nothing.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

IDLE = 6.0  # seconds without anything to do: a hang
GRACE = 4.0  # seconds in which the helpers of a process that has ended may end too
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


def import_all() -> None:
    import momentum2

    extra = ("torch._dynamo", "rich.progress", "rich.table", "PIL.Image", "faster_coco_eval")
    for name in extra:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(momentum2.__path__, "momentum2."):
        if not module.name.endswith("__main__") and ".engine" not in module.name:
            importlib.import_module(module.name)
    from PIL import Image

    Image.init()
    assert len(os.listdir("/proc/self/task")) == 1, "A fork has only one of the threads."
    gc.collect()
    gc.freeze()


def serve() -> dict[str, Any] | None:
    """Answer requests until the input ends. Returns None then, but in the forks what they are to run."""
    import_all()
    _libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: whom a case leaves behind becomes ours
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = os.fork()
        if started == 0:
            return request  # type: ignore[no-any-return]
        print(json.dumps(_observe(started, request)), flush=True)
    return None


def _observe(process: int, request: dict[str, Any]) -> dict[str, Any]:
    ended, used, peak, reason = None, 0.0, 0, ""
    seen, idle, pause = -1.0, 0.0, 0.002
    while ended is None:
        found, status, usage = os.wait4(process, os.WNOHANG)
        if found:
            ended = os.waitstatus_to_exitcode(status)
            used = max(used, usage.ru_utime + usage.ru_stime)
            peak = max(peak, usage.ru_maxrss // 1024)
            break
        family = [process, *_below(process)]
        looks = [look for member in family if (look := _look(member))]
        spent, memory = sum(cpu for cpu, _, _ in looks), sum(rss for _, rss, _ in looks)
        used, peak = max(used, spent), max(peak, memory // (1 << 20) if len(looks) == 1 else 0)
        if spent != seen or any(state in "RD" for _, _, state in looks):
            seen, idle = spent, 0.0
        if spent > request["cpu"]:
            reason = "slow"
        elif memory > request["memory"] << 20:
            reason = "memory"
        elif idle > request.get("idle", IDLE):
            reason = "hang"
        if reason:
            for member in family:
                _kill(member)
            os.waitpid(process, 0)
            ended = -signal.SIGKILL
        time.sleep(pause)
        idle += pause  # what was slept: by the clock, a machine that stood still would be a hang
        pause = min(pause * 1.3, 0.05)
    left = [] if reason else _left()
    _clean()
    return {"code": ended, "cpu": used, "peak": peak, "reason": reason, "left": left}


def _below(process: int) -> list[int]:
    try:
        children = [
            int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
        ]
    except OSError:
        return []
    return children + [low for child in children for low in _below(child)]


def _look(process: int) -> tuple[float, int, str] | None:
    """CPU seconds, bytes in memory and state of a process."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICK, int(fields[21]) * _PAGE, fields[0]


def _left() -> list[str]:
    """The commands of whom the case has left behind, after some time to end."""
    end = time.monotonic() + GRACE
    while _reap() and time.monotonic() < end:
        time.sleep(0.02)
    return [_command(child) for child in _reap()]


def _reap() -> list[int]:
    """The living among our children."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break
    me = os.getpid()
    return [int(child) for child in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _clean() -> None:
    while found := _reap():
        for child in found:
            for member in [child, *_below(child)]:
                _kill(member)
        time.sleep(0.005)


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _command(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return "gone"
    return words[:200].decode("utf-8", "backslashreplace") or "unnamed"


def become(request: dict[str, Any]) -> int:
    """Be the command that was asked for; returns its exit code."""
    os.setsid()
    os.chdir(request["folder"])
    _redirect(request)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name in request.get("without", ()):
        os.environ.pop(name, None)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.set_int_max_str_digits(4300)
    tempfile.tempdir = None
    _libc.prctl(36, 0, 0, 0, 0)
    if request.get("disk"):
        _small_disk(*request["disk"])
        os.chdir(request["folder"])
    for name, value in request.get("limits", {}).items():
        number = getattr(resource, f"RLIMIT_{name}")
        if name == "AS":  # above what the imports have taken
            value += int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
        resource.setrlimit(number, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if request.get("powerless"):
        _drop_powers()
    sys.path.insert(0, os.getcwd())
    if request.get("gone"):
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
    sys.argv = ["momentum2", *request["arguments"]]
    from momentum2.__main__ import main

    return main()


def _redirect(request: dict[str, Any]) -> None:
    encoding = request.get("encoding", "utf-8")
    for number, (name, flags) in enumerate(
        (("/dev/null", os.O_RDONLY), (request["stdout"], os.O_WRONLY), (request["stderr"], os.O_WRONLY))
    ):
        descriptor = os.open(name, flags | os.O_CREAT * (number > 0), 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding=encoding, errors="backslashreplace", closefd=False, buffering=1
    )
    for name, kind in request.get("streams", {}).items():
        number = {"stdout": 1, "stderr": 2}[name]
        if kind == "closed":
            os.close(number)
            setattr(sys, name, None)  # as Python does when it starts
            continue
        descriptor = os.open("/dev/full", os.O_WRONLY) if kind == "full" else _broken_pipe()
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr


def _broken_pipe() -> int:
    """A pipe whose reader, such as `head`, has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def _small_disk(place: str, size: str) -> None:
    """A file system of its own at `place`, so that it can be full; nobody else sees it."""
    if _libc.unshare(0x00020000) or _libc.mount(b"none", b"/", None, 0x44000, None):  # CLONE_NEWNS, private
        os._exit(77)
    if _libc.mount(b"none", place.encode(), b"tmpfs", 0, f"size={size}".encode()):
        os._exit(77)


def _drop_powers() -> None:
    """Root passes every permission; without capabilities it does not."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    header, none = Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if _libc.capset(ctypes.byref(header), none):
        os._exit(77)


def _end(code: int) -> None:
    """End as Python does, but without taking all modules apart, which would be most of the time of a case."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120  # as Python does, with lines that nobody wants to read
    os._exit(code)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    wanted = serve()
    if wanted is not None:
        _end(become(wanted))
