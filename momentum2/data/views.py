"""Batches that come out as views."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from momentum2.augment import ViewSpec, render
from momentum2.data.loader import Batch, Loader


@dataclass(frozen=True)
class ViewBatch:
    """One step's images, augmented micro-batch by micro-batch."""

    batch: Batch
    specs: tuple[ViewSpec, ...]

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def wait(self) -> float:
        return self.batch.wait

    def inputs(self, i: int, n: int) -> tuple[list[Tensor], Tensor | None]:
        micro = self.batch.chunk(i, n)
        return render(micro.images, micro.draws, self.specs, channels_last=True), micro.labels


class ViewBatches:
    """A loader whose batches come out as views."""

    def __init__(self, loader: Loader, specs: tuple[ViewSpec, ...]) -> None:
        self.loader, self.specs = loader, specs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.loader.close()

    def __iter__(self) -> Iterator[ViewBatch]:
        return (ViewBatch(batch, self.specs) for batch in self.loader)
