"""The pixels of a batch: whole images where all have one size, else the crops that its views ask for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from momentum2.augment import Draws, ViewSpec, crop_boxes, draw_at, resized_crop_one
from momentum2.data.dataset import Dataset, Ints
from momentum2.data.images import BadImage, Picture, Pixels
from momentum2.data.workers import SharedMemory
from momentum2.errors import UserError

#: Whole images travel if they have at most this many times the pixels of the views made from them.
_WHOLE = 4
#: A JPEG is decoded at a reduced size if that leaves every crop at least this many times the view's side.
_MARGIN = 1.5

Images = NDArray[np.uint8]  # (n, height, width, channels)


class Chunk(NamedTuple):
    """Some samples of a batch."""

    step: int
    places: Ints  # of theirs in the global batch
    row: int  # of the first of them in this process's part of it
    slot: int  # of the shared memory
    indices: Ints


class Done(NamedTuple):
    """`taken` are the images really used, None if the bad images became too many."""

    taken: Ints | None
    bad: dict[int, str]
    images: list[Images]  # empty if they are in the shared memory


@dataclass(frozen=True)
class Assemble:
    """The task of turning a `Chunk` into pixels, here or in a worker process.

    Args:
        dataset: The images.
        specs: The views.
        seed: Of the draws.
        count: Samples in the global batch.
        local: Samples in this process's part of it.
        memory: Where to put the pixels, `slot_bytes` for each slot; by default they are returned.
    """

    dataset: Dataset
    specs: tuple[ViewSpec, ...]
    seed: int
    count: int
    local: int
    memory: SharedMemory | None = None

    def __call__(self, chunk: Chunk) -> Done:
        known = set(self.dataset.bad)
        images = self._room(chunk)
        try:
            taken = self._whole(chunk, images[0]) if self.whole else self._crops(chunk, images)
        except UserError:
            taken = None
        bad = {index: reason for index, reason in self.dataset.bad.items() if index not in known}
        return Done(taken, bad, images if self.memory is None else [])

    @property
    def whole(self) -> bool:
        """Whether images go to the device as they are, or as crops."""
        if self.dataset.fixed_size is None:
            return False
        height, width = self.dataset.fixed_size
        return height * width <= _WHOLE * sum(spec.size**2 for spec in self.specs)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        if self.whole and self.dataset.fixed_size is not None:
            return [self.dataset.fixed_size]
        return [(spec.size, spec.size) for spec in self.specs]

    @property
    def slot_bytes(self) -> int:
        return sum(self.local * height * width * self.dataset.channels for height, width in self.sizes)

    def slot(self, number: int) -> list[Images]:
        """The whole local batch in the shared memory."""
        assert self.memory is not None
        return list(self._cut(self.memory.bytes[number * self.slot_bytes :]))

    def _cut(self, memory: NDArray[np.uint8]) -> Iterator[Images]:
        start = 0
        for height, width in self.sizes:
            stop = start + self.local * height * width * self.dataset.channels
            yield memory[start:stop].reshape(self.local, height, width, -1)
            start = stop

    def _room(self, chunk: Chunk) -> list[Images]:
        if self.memory is None:
            return [
                np.empty((len(chunk.indices), *size, self.dataset.channels), np.uint8) for size in self.sizes
            ]
        return [images[chunk.row : chunk.row + len(chunk.indices)] for images in self.slot(chunk.slot)]

    def _whole(self, chunk: Chunk, images: Images) -> Ints:
        taken, images[:] = self.dataset.fetch(chunk.indices)
        return taken

    def _crops(self, chunk: Chunk, images: list[Images]) -> Ints:
        draws = [
            draw_at(spec, self.seed, chunk.step, view, self.count, chunk.places)
            for view, spec in enumerate(self.specs)
        ]
        opened = [self.dataset.good(index, _with_size) for index in chunk.indices.tolist()]
        taken = np.array([index for index, _ in opened], np.int64)
        sizes = torch.tensor([size for _, (_, size) in opened])
        boxes = [crop_boxes(draws_of_view, sizes[:, 0], sizes[:, 1]).tolist() for draws_of_view in draws]
        for row, (_, (picture, _)) in enumerate(opened):
            rooms = [view[row] for view in images]
            try:
                self._crop(picture, [of_view[row] for of_view in boxes], rooms)
            except BadImage as reason:  # the header was fine, the rest is not
                self.dataset.bad[int(taken[row])] = str(reason)
                taken[row] = self._crop_neighbor(int(taken[row]), [d[row : row + 1] for d in draws], rooms)
        return taken

    def _crop(self, picture: Picture, boxes: list[list[int]], rooms: list[Pixels]) -> None:
        zoom = min(min(box[2:]) / spec.size for box, spec in zip(boxes, self.specs, strict=True))
        reduce = next((factor for factor in (8, 4, 2) if zoom >= factor * _MARGIN), 1)
        pixels = picture.pixels(reduce)
        scale = reduce if pixels.shape[:2] != picture.size else 1
        for room, (top, left, height, width), spec in zip(rooms, boxes, self.specs, strict=True):
            box = (top / scale, left / scale, height / scale, width / scale)
            room[:] = resized_crop_one(pixels, box, spec.size)

    def _crop_neighbor(self, index: int, draws: list[Draws], rooms: list[Pixels]) -> int:
        self.dataset.check_bad()

        def crop(picture: Picture) -> None:
            self._crop(picture, [crop_boxes(d, *picture.size)[0].tolist() for d in draws], rooms)

        return self.dataset.good(index, crop)[0]


def _with_size(picture: Picture) -> tuple[Picture, tuple[int, int]]:
    return picture, picture.size
