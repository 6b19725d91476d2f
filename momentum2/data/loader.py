"""Batches on the device, in an order and with draws that depend on (seed, step) alone."""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from momentum2.augment import Draws, ViewSpec, draw_at
from momentum2.config import ExactOrder
from momentum2.data.assemble import Assemble, Chunk, Done, Images
from momentum2.data.bad_images import report_bad
from momentum2.data.dataset import Dataset, Ints
from momentum2.data.sampler import batch_indices, own_places, steps_per_epoch
from momentum2.data.workers import AHEAD, SharedMemory, Workers, needs_main
from momentum2.errors import SettingError, UserError
from momentum2.machine import allowed_cores

T = TypeVar("T")

log = logging.getLogger("momentum2")

_PREFETCH = 2  # batches that wait for the consumer
_JOB = 32  # at most this many samples per job of a worker


@dataclass(frozen=True)
class Batch:
    """This process's part of the batch of one step, n samples.

    Attributes:
        step: The optimizer step, or the number of the batch in an evaluation.
        images: uint8 on the device, as `augment.render` takes them: whole images (n, channels, H, W), or for each
            view its crops (n, channels, size, size).
        draws: For each view the random decisions, on the CPU.
        labels: int64 (n,) on the device, or None.
        indices: int64 (n,) on the CPU: which images these are.
        wait: Seconds for which the consumer had to wait.
    """

    step: int
    images: Tensor | tuple[Tensor, ...]
    draws: tuple[Draws, ...]
    labels: Tensor | None
    indices: Tensor
    wait: float

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, rows: slice | Tensor) -> "Batch":
        images = self.images[rows] if isinstance(self.images, Tensor) else tuple(i[rows] for i in self.images)
        labels = None if self.labels is None else self.labels[rows]
        draws = tuple(of_view[rows] for of_view in self.draws)
        return Batch(self.step, images, draws, labels, self.indices[rows], self.wait)

    def chunk(self, number: int, count: int) -> "Batch":
        """This process's part of micro-batch `number` of `count`."""
        return self[len(self) * number // count : len(self) * (number + 1) // count]


class Loader:
    """Training batches for the steps from `start` to `stop`.

    Iterating starts the processes and threads it needs and ends them when it is over; `close` (or leaving the
    `with` block) ends them early.

    Args:
        dataset: The images.
        specs: The views, for their draws and crops.
        seed: Of order and draws.
        order: How the images are shuffled.
        batch_size: Samples per step over all processes.
        accumulate: Micro-batches that the global batch is cut into.
        rank: Which consecutive part of each micro-batch is ours ...
        world: ... of how many.
        device: Where batches go.
        workers: Decoding processes (used where there is something to decode or to crop); None as `default_workers`.
        start: The first step; starting later gives the same batches.
        stop: The step before which to stop.
        bad_images: Where to list unreadable images.
        timeout: Seconds after which a worker process that gives nothing is an error.
    """

    def __init__(
        self,
        dataset: Dataset,
        specs: tuple[ViewSpec, ...],
        *,
        seed: int,
        batch_size: int,
        stop: int,
        start: int = 0,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        device: torch.device | str = "cpu",
        workers: int | None = None,
        bad_images: Path | None = None,
        timeout: float = 300.0,
        order: ExactOrder = "exact",
    ) -> None:
        steps_per_epoch(len(dataset), batch_size)  # refuses a batch that is too large
        if batch_size % (world * accumulate):
            raise SettingError(
                "train.batch_size",
                f"{batch_size} cannot be divided among {world} processes × {accumulate} micro-batches. "
                f"Choose a multiple of {world * accumulate}.",
            )
        self.steps = range(start, stop)
        self._dataset, self._seed, self._batch_size, self._order = dataset, seed, batch_size, order
        self._places = own_places(batch_size, accumulate, rank, world)
        local = batch_size // world
        task = Assemble(dataset, specs, seed, count=batch_size, local=local)
        self._feed = _Feed(task, torch.device(device), workers, bad_images, timeout)
        self._running: Generator[Batch, None, None] | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._running = self._feed.run(self._plan())
        return self._running

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _plan(self) -> Iterator["_Part"]:
        for step in self.steps:
            batch = batch_indices(len(self._dataset), self._seed, step, self._batch_size, self._order)
            yield _Part(step, self._places, batch[self._places])


def iterate(
    dataset: Dataset,
    spec: ViewSpec,
    batch_size: int,
    *,
    indices: Ints | None = None,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    bad_images: Path | None = None,
) -> Generator[Batch, None, None]:
    """Every image once and in order, in batches of at most `batch_size`; unreadable ones are left out.

    Args:
        dataset: The images.
        spec: The one view, usually without randomness.
        batch_size: Samples at a time in this process.
        indices: Only these images.
        rank: Which consecutive part of them is ours ...
        world: ... of how many.
        device: Where batches go.
        workers: Decoding processes.
        bad_images: Where to list unreadable images.
    """
    every = np.arange(len(dataset)) if indices is None else np.asarray(indices, np.int64)
    ours = np.array_split(every, world)[rank]
    parts = [ours[start : start + batch_size] for start in range(0, len(ours), batch_size)]
    task = Assemble(dataset, (spec,), 0, count=batch_size, local=batch_size)
    feed = _Feed(task, torch.device(device), workers, bad_images)
    plan = (_Part(number, np.arange(len(part)), part) for number, part in enumerate(parts))
    with closing(feed.run(plan)) as batches:
        for part, batch in zip(parts, batches, strict=True):
            kept = batch.indices == torch.from_numpy(part)
            yield batch if kept.all() else batch[kept.nonzero()[:, 0]]


class _Part(NamedTuple):
    """What this process does for a step; `places` are those of its samples in the global batch."""

    step: int
    places: Ints
    indices: Ints


class _Host(NamedTuple):
    """A batch in (pinned) memory of the host; images are (n, height, width, channels)."""

    step: int
    images: list[Tensor]
    draws: tuple[Draws, ...]
    labels: Tensor | None
    taken: Ints


@dataclass(frozen=True)
class _Feed:
    """The way of the batches from the data set to the device: [processes ->] thread -> consumer."""

    task: Assemble
    device: torch.device
    workers: int | None
    bad_images: Path | None
    timeout: float = 300.0

    def run(self, plan: Iterable[_Part]) -> Generator[Batch, None, None]:
        dataset = self.task.dataset
        report_bad(dataset, dict(dataset.bad), self.bad_images)
        count, main = self._count_workers()
        if count == 0 or (dataset.in_memory and self.task.whole):
            ready = self._collect(plan, partial(map, self.task), self.task, self.task.local, slots=1)
            yield from self._deliver(ready, interrupt=lambda: None)
            return
        samples = min(_JOB, _divide_up(self.task.local, 2 * count))
        slots = 2 + _divide_up(AHEAD * count, _divide_up(self.task.local, samples))
        task = replace(self.task, memory=SharedMemory(slots * self.task.slot_bytes))
        with Workers(task, count, self._describe, self.timeout, main) as workers:
            ready = self._collect(plan, workers.map, task, samples, slots)
            yield from self._deliver(ready, workers.interrupt)

    def _count_workers(self) -> tuple[int, bool]:
        """As told; where nothing was said, none if they cannot be given the data set. Then, whether they import the
        program."""
        dataset, count = self.task.dataset, self.workers
        if count is None:
            count = default_workers(self.device)
            try:
                return count, count > 0 and not dataset.in_memory and _check_picklable(dataset)
            except UserError as error:
                log.warning("%s Until then, the training process decodes the images.", error)
                return 0, False
        if count and not (dataset.in_memory and self.task.whole):
            return count, _check_picklable(dataset)
        return count, False

    def _collect(
        self,
        plan: Iterable[_Part],
        perform: Callable[[Iterable[Chunk]], Iterator[Done]],
        task: Assemble,
        samples: int,
        slots: int,
    ) -> Iterator[_Host]:
        """Divide each part into chunks of `samples`, have them performed, and put the results together."""
        ahead, behind = tee(enumerate(plan))
        results = perform(
            Chunk(part.step, part.places[row:][:samples], row, number % slots, part.indices[row:][:samples])
            for number, part in ahead
            for row in range(0, len(part.indices), samples)
        )
        for number, part in behind:
            done = list(islice(results, _divide_up(len(part.indices), samples)))
            report_bad(
                task.dataset, {i: why for each in done for i, why in each.bad.items()}, self.bad_images
            )
            taken = np.concatenate([each.taken for each in done])
            images = done[0].images or [images[: len(taken)] for images in task.slot(number % slots)]
            draws = tuple(
                draw_at(spec, task.seed, part.step, view, task.count, part.places)
                for view, spec in enumerate(task.specs)
            )
            labels = None if task.dataset.labels is None else self._own(task.dataset.labels[taken])
            yield _Host(part.step, [self._own(array) for array in images], draws, labels, taken)

    def _own(self, values: Images | Ints) -> Tensor:
        """A copy of its own for what will be overwritten; pinned if a GPU is to fetch it."""
        tensor = torch.from_numpy(values)
        if self.device.type == "cuda":
            return tensor.pin_memory()
        return tensor if values.base is None else tensor.clone()

    def _deliver(self, ready: Iterator[_Host], interrupt: Callable[[], None]) -> Iterator[Batch]:
        with closing(_in_background(ready, interrupt)) as hosts:
            while True:
                begin = time.perf_counter()
                host = next(hosts, None)
                if host is None:
                    return
                wait = time.perf_counter() - begin
                images = tuple(i.to(self.device, non_blocking=True).permute(0, 3, 1, 2) for i in host.images)
                yield Batch(
                    host.step,
                    images[0] if self.task.whole else images,
                    host.draws,
                    None if host.labels is None else host.labels.to(self.device, non_blocking=True),
                    torch.from_numpy(host.taken),
                    wait,
                )

    def _describe(self, chunk: Chunk) -> str:
        names = self.task.dataset.names
        return f"step {chunk.step}, images {', '.join(names[i] for i in chunk.indices[:3])} and the following"


def default_workers(device: torch.device) -> int:
    """Decoding processes where nothing else was said.

    One thread that decodes starves a GPU, and keeps the thread that feeds it from running; on a CPU there is nothing to
    gain.
    """
    if device.type != "cuda":
        return 0
    return max(1, min(16, allowed_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1))


def _check_picklable(dataset: Dataset) -> bool:
    """Whether worker processes need the program to unpickle the data set; a `UserError` if they cannot get it."""
    try:
        main = needs_main(dataset)
    except Exception as error:
        raise UserError(
            f"The data set cannot be sent to worker processes ({error}). Make it picklable, or set data.workers to 0."
        ) from None
    program = getattr(sys.modules["__main__"], "__file__", None)
    if main and not (program and Path(program).exists()):
        raise UserError(
            "Worker processes cannot import what was defined in a notebook or a console. Put it in a module, or set "
            "data.workers to 0."
        )
    return main


def _in_background(source: Iterator[T], interrupt: Callable[[], None]) -> Generator[T, None, None]:
    """The items of `source`, computed by a thread a few items ahead; `interrupt` wakes it if it waits."""
    items: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(_PREFETCH)
    stopped = threading.Event()

    def put(item: T | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                items.put((item, error), timeout=0.1)
                return

    def produce() -> None:
        # This thread's own count. A second team of OpenMP threads would leave the first one too few cores by
        # its own count, so that it sleeps between parallel regions: on two cores a step took twice as long.
        torch.set_num_threads(1)
        try:
            for item in source:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, None)
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=produce, name="momentum2-loader", daemon=True)
    thread.start()
    try:
        while True:
            item, error = items.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        if thread.is_alive():
            interrupt()
        thread.join()


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)
