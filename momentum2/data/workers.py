"""Worker processes that turn jobs into results, in order, and are missed when they die or hang."""

import contextlib
import io
import mmap
import os
import pickle
import signal
import tempfile
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import current_process, get_context, reduction, spawn
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from momentum2.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")

AHEAD = 3  # jobs that wait in each worker's pipe, so that it never has to


class Workers(Generic[Job, Result]):
    """`count` processes, each with its own copy of `task`. Close it, or use it as a context manager.

    The processes are forked from a server that knows nothing of this process, so its threads and its GPU are
    safe; `task` and the jobs are pickled. They end when this process does, however it does: pipes close.

    Args:
        task: What is done to each job.
        count: Number of processes, at least 1.
        describe: What to call a job in an error message.
        timeout: Seconds without a result after which a worker is taken for stuck.
        main: Whether they import the program that was started, which is needed if `task` names something in it. Without
            `if __name__ == "__main__":`, all of it would run again.
    """

    def __init__(
        self,
        task: Callable[[Job], Result],
        count: int,
        describe: Callable[[Job], str],
        timeout: float = 300.0,
        main: bool = False,
    ) -> None:
        refuse_unguarded()
        self.describe, self.timeout = describe, timeout
        self.ahead = AHEAD * count
        self._processes = []
        self._pipes: list[Connection] = []
        context = get_context("forkserver")
        context.set_forkserver_preload(["momentum2.data.assemble"])  # torch is imported once, not by each
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, _ByValue(task)), daemon=True, name=f"momentum2-worker-{number}"
            )
            with contextlib.nullcontext() if main else _hidden_main():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def map(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results in the order of the jobs, of which at most `ahead` are taken before their results are."""
        waiting: deque[tuple[int, Job]] = deque()
        for number, job in enumerate(jobs):
            worker = number % len(self._pipes)
            self._send(worker, job)
            waiting.append((worker, job))
            if len(waiting) == self.ahead:
                yield self._receive(*waiting.popleft())
        while waiting:
            yield self._receive(*waiting.popleft())

    def interrupt(self) -> None:
        """End the processes, whatever they are doing; a thread that waits for a result gets an error."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the processes and forget them."""
        self.interrupt()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
            process.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> "Workers[Job, Result]":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, worker: int, job: Job) -> None:
        try:
            self._pipes[worker].send(job)
        except OSError:
            raise self._lost(worker, job) from None

    def _receive(self, worker: int, job: Job) -> Result:
        pipe = self._pipes[worker]
        try:
            if not pipe.poll(self.timeout):
                raise UserError(
                    f"Worker process {worker} (pid {self._processes[worker].pid}) has been busy with"
                    f" {self.describe(job)} for {self.timeout:g} seconds. "
                    "Check the disk or network that it reads from, or use fewer workers."
                )
            ok, value = pipe.recv()
        except (EOFError, OSError):
            raise self._lost(worker, job) from None
        if ok:
            result: Result = value
            return result
        raise RuntimeError(f"Worker process {worker} failed with {self.describe(job)}:\n{value}")

    def _lost(self, worker: int, job: Job) -> UserError:
        process = self._processes[worker]
        process.join(5)
        ended = f"Worker process {worker} (pid {process.pid}) ended with exit code {process.exitcode}"
        if process.exitcode is not None and process.exitcode > 0:
            return UserError(f"{ended} at {self.describe(job)}. What it printed says why.")
        return UserError(
            f"{ended} at {self.describe(job)}. It may have run out of memory; try fewer workers."
        )


def refuse_unguarded() -> None:
    """Refuse to do anything in a process that is only importing the program."""
    if getattr(current_process(), "_inheriting", False):
        raise UserError(
            "Worker processes import this program because the data set is defined in it, and that runs it again. "
            'Put what it runs under `if __name__ == "__main__":`.'
        )


def needs_main(thing: object) -> bool:
    """Whether only a process that imports the program that was started can unpickle `thing`."""
    pickler = _Pickler(_Nowhere())
    pickler.dump(thing)
    return pickler.needs_main


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Pickler(pickle.Pickler):
    """Pickles a tensor as an array: of one that shares its memory with others, only its own values."""

    needs_main = False

    def reducer_override(self, thing: Any) -> Any:
        if "__main__" in (getattr(thing, "__module__", None), type(thing).__module__):
            self.needs_main = True
        if type(thing) is Tensor and thing.device.type == "cpu" and thing.dtype in _ARRAYS:
            return torch.from_numpy, (thing.detach().numpy(),)
        return NotImplemented


#: Of the types that NumPy has, those of images and labels.
_ARRAYS = {torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.bool}


class _ByValue:
    """Pickled as what it holds. multiprocessing would share tensors, each by a file descriptor of each worker."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        file = io.BytesIO()
        _Pickler(file).dump(self.thing)
        return pickle.loads, (file.getvalue(),)


_main = threading.local()  # `hidden` while this thread starts a process that is not to import it
_prepare = spawn.get_preparation_data


def _prepare_without_main(name: str) -> dict[str, Any]:
    """What multiprocessing sends to a new process first, which includes where the program is."""
    data = _prepare(name)
    if getattr(_main, "hidden", False):
        for key in ("init_main_from_name", "init_main_from_path"):
            data.pop(key, None)
    return data


spawn.get_preparation_data = _prepare_without_main


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    _main.hidden = True
    try:
        yield
    finally:
        _main.hidden = False


def _work(pipe: Connection, task: Callable[[Any], Any]) -> None:
    # Ctrl-C and torchrun's SIGTERM reach all processes of the group, but are for the parent: it saves, for which it may
    # need the batches under way, and then ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # a damaged file is told as a bad image
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            job = pipe.recv()
            try:
                answer = (True, task(job))
            except Exception:
                answer = (False, traceback.format_exc())
            pipe.send(answer)


class SharedMemory:
    """Bytes that this process and its workers see, without a name or a file that could be left behind.

    It can be pickled only while a worker is started. (Not /dev/shm, which is tiny in many containers.)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("momentum2")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, size)
        self._attach(descriptor)

    def _attach(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, self.size), np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {"size": self.size, "descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.size = state["size"]
        self._attach(state["descriptor"].detach())

    def __del__(self) -> None:
        os.close(self._descriptor)
