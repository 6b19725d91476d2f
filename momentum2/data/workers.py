"""Worker processes that turn jobs into results, in order, and are missed when they die or hang."""

import contextlib
import io
import mmap
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import current_process, get_context, reduction
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from momentum2.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")

AHEAD = 3  # jobs that wait in each worker's pipe, so that it never has to


class Workers(Generic[Job, Result]):
    """`count` processes, each with its own copy of `task`. Close it, or use it as a context manager.

    The processes are forked from a server that knows nothing of this process, so its threads and its GPU are
    safe; `task` and the jobs are pickled. They end when this process does, however it does: pipes close. They import
    the program that called only if `task` has something of it, such as the class of a data set.

    Args:
        task: What is done to each job.
        count: Number of processes, at least 1.
        describe: What to call a job in an error message.
        timeout: Seconds without a result after which a worker is taken for stuck.
    """

    def __init__(
        self,
        task: Callable[[Job], Result],
        count: int,
        describe: Callable[[Job], str],
        timeout: float = 300.0,
    ) -> None:
        self.describe, self.timeout = describe, timeout
        self.ahead = AHEAD * count
        self._processes = []
        self._pipes: list[Connection] = []
        context = get_context("forkserver")
        context.set_forkserver_preload(["momentum2.data.assemble"])  # torch is imported once, not by each
        program = _has_parts_of_program(task)
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, task), daemon=True, name=f"momentum2-worker-{number}"
            )
            with contextlib.nullcontext() if program else _unseen_program():
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
        return UserError(
            f"Worker process {worker} (pid {process.pid}) ended with exit code {process.exitcode} at"
            f" {self.describe(job)}. It may have run out of memory; try fewer workers."
        )


def refuse_unguarded() -> None:
    """Refuse to begin anything while a new process imports the program, which then is not guarded against that."""
    if getattr(current_process(), "_inheriting", False):
        raise UserError(
            "A worker process imports this program because the data set is from it, and the program trains when it is "
            'imported. Put that part under `if __name__ == "__main__":`.'
        )


class _Search(pickle.Pickler):
    """Pickles to find out whether anything is defined in the program itself."""

    found = False

    def reducer_override(self, thing: Any) -> Any:
        origin = thing if isinstance(thing, type | FunctionType) else type(thing)
        self.found = self.found or origin.__module__ == "__main__"
        return (int, ()) if isinstance(thing, SharedMemory) else NotImplemented


def _has_parts_of_program(task: object) -> bool:
    search = _Search(io.BytesIO())
    search.dump(task)
    return search.found


@contextlib.contextmanager
def _unseen_program() -> Iterator[None]:
    """New processes do not import the program, which would run all of one without `if __name__ == "__main__":`."""
    program = vars(sys.modules["__main__"])
    seen: dict[str, Any] = {name: program[name] for name in ("__file__", "__spec__") if name in program}
    try:
        program.update(dict.fromkeys(seen))
        yield
    finally:
        program.update(seen)


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
