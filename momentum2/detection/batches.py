"""The batches of fine-tuning: a pure function of (seed, step), read ahead by threads."""

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from momentum2 import distributed
from momentum2.data.sampler import own_places
from momentum2.detection.data import DetectionData
from momentum2.detection.presets import DetectionDataConfig
from momentum2.detection.sampling import Sampler
from momentum2.detection.targets import Target
from momentum2.detection.transforms import draw, training_view
from momentum2.seeds import derive

_AHEAD = 2  # batches that are being read while one is used


@dataclass(frozen=True)
class DetectionBatch:
    """This process's images of one step."""

    step: int
    wait: float
    views: list[tuple[Tensor, Target]]
    device: torch.device

    def inputs(self, i: int, n: int) -> tuple[list[Tensor], list[Target]]:
        """Images and targets of micro-batch i of n."""
        share = len(self.views) // n
        part = self.views[i * share : (i + 1) * share]
        images = [image.to(self.device) for image, _ in part]
        return images, [on_device(target, self.device) for _, target in part]


def on_device(target: Target, device: torch.device) -> Target:
    """The same objects on `device`."""
    moved = {name: v.to(device) if isinstance(v, Tensor) else v for name, v in target.items()}
    return cast(Target, moved)


@dataclass(frozen=True)
class Batches:
    """Makes the batches of steps 0 to `steps - 1`."""

    data: DetectionData
    config: DetectionDataConfig
    sampler: Sampler
    masks: bool
    steps: int
    device: torch.device
    accumulate: int = 1

    @contextmanager
    def __call__(self, start: int) -> Iterator[Iterator[DetectionBatch]]:
        """The batches from step `start` on."""
        if self.config.workers == 0:
            yield self._direct(start)
            return
        # Each computes alone, as the loader's thread in pretraining does: teams of theirs would put ours to sleep.
        with ThreadPoolExecutor(self.config.workers, "images", torch.set_num_threads, (1,)) as pool:
            try:
                yield self._ahead(start, pool)
            finally:
                pool.shutdown(cancel_futures=True)

    def _direct(self, start: int) -> Iterator[DetectionBatch]:
        for step in range(start, self.steps):
            began = time.perf_counter()
            views = [self._view(step, place, index) for place, index in self._share(step)]
            yield self._batch(step, views, began)

    def _ahead(self, start: int, pool: ThreadPoolExecutor) -> Iterator[DetectionBatch]:
        coming: deque[list[Future[tuple[Tensor, Target]]]] = deque()
        for step in range(start, self.steps):
            while len(coming) <= _AHEAD and (later := step + len(coming)) < self.steps:
                coming.append([pool.submit(self._view, later, p, index) for p, index in self._share(later)])
            began = time.perf_counter()
            yield self._batch(step, [future.result() for future in coming.popleft()], began)

    def _batch(self, step: int, views: list[tuple[Tensor, Target]], began: float) -> DetectionBatch:
        wait = time.perf_counter() - began
        return DetectionBatch(step, wait, views, self.device)

    def _share(self, step: int) -> list[tuple[int, int]]:
        """(place in the global batch, image) of this process's part.

        The batch is sorted by shape before it is cut, so that images that are padded to one size have similar ones.
        The draws of an image are those of its place before.
        """
        batch = self.sampler.batch(step).tolist()
        places = sorted(range(len(batch)), key=lambda place: self.data.aspect(batch[place]))
        own = own_places(len(batch), self.accumulate, distributed.rank(), distributed.world_size())
        return [(places[i], batch[places[i]]) for i in own.tolist()]

    def _view(self, step: int, place: int, index: int) -> tuple[Tensor, Target]:
        seed = self.sampler.seed
        change = draw(self.config, seed, step, place)
        target = self.data.target(index, self.masks)
        target["draw"] = derive(seed, "detection", "sample", step, place)
        return training_view(self.data.image(index), target, change, self.config.max_long_edge)
