"""Making a cache of decoded images.

It is a folder with `pixels.bin` (the images one after another, uint8, height x width x 3), `index.npy` (for
each its first byte, height and width) and `manifest.json` (what could not be read, and why; checksums of the other
two). It is made under another name and then renamed, so a folder under its own name is whole. Nothing in it is a
pickle.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from momentum2.data.dataset import Dataset, Ints
from momentum2.data.images import BadImage, Pixels
from momentum2.data.workers import Workers
from momentum2.files import whole_folder, write_new
from momentum2.machine import allowed_cores
from momentum2.terminal import has_bars

log = logging.getLogger("momentum2")

#: Bytes of `pixels.bin` that have a checksum of their own.
BLOCK = 1 << 18
_JOB_BYTES = 8 << 20  # of decoded images that travel from a worker at a time
_INLINE_BYTES = 64 << 20  # below this, starting processes takes longer than decoding


class _Decoded(NamedTuple):
    sizes: list[tuple[int, int]]  # (0, 0) for a bad image
    pixels: bytes
    bad: dict[int, str]


@dataclass(frozen=True)
class _Decode:
    """The workers' task."""

    dataset: Dataset

    def __call__(self, job: range) -> _Decoded:
        if self.dataset.fixed_size is not None:  # made of arrays, none of which is bad
            images = np.asarray(self.dataset.read(job))
            return _Decoded([self.dataset.fixed_size] * len(job), images.tobytes(), {})
        done = _Decoded([], b"", {})
        parts = []
        for index in job:
            image, reason = decode(self.dataset, index)
            if image is None:
                done.bad[index] = reason
                done.sizes.append((0, 0))
            else:
                done.sizes.append((image.shape[0], image.shape[1]))
                parts.append(image.tobytes())
        return done._replace(pixels=b"".join(parts))


def decode(dataset: Dataset, index: int) -> tuple[Pixels | None, str]:
    """The image, or None and what is wrong with it."""
    try:
        return dataset.picture(index).pixels(), ""
    except BadImage as reason:
        return None, str(reason)


def pack(dataset: Dataset, folder: Path, estimate: int) -> None:
    """Make the cache `folder` of all images, about `estimate` bytes. The caller holds its lock."""
    each = max(1, _JOB_BYTES * len(dataset) // max(estimate, 1))
    jobs = [range(start, min(start + each, len(dataset))) for start in range(0, len(dataset), each)]
    shutil.rmtree(folder, ignore_errors=True)  # if it is corrupt
    with whole_folder(folder, f"{folder.name}.building") as building:
        with (building / "pixels.bin").open("xb") as file, _results(dataset, jobs, estimate) as results:
            index, bad, blocks = _write(results, file)
        np.save(building / "index.npy", index, allow_pickle=False)
        manifest = {
            "bytes": int((building / "pixels.bin").stat().st_size),
            "index": hashlib.sha256((building / "index.npy").read_bytes()).hexdigest(),
            "blocks": blocks,
            "bad": bad,
        }
        write_new(building / "manifest.json", json.dumps(manifest, indent=1))


def _write(results: Iterator[_Decoded], file: BinaryIO) -> tuple[Ints, dict[int, str], list[int]]:
    sizes: list[tuple[int, int]] = []
    bad: dict[int, str] = {}
    blocks, room = [0], BLOCK  # the checksum of each BLOCK bytes, and how many of them the last one lacks
    for done in results:
        file.write(done.pixels)
        sizes += done.sizes
        bad |= done.bad
        rest = memoryview(done.pixels)
        while rest:
            if room == 0:
                blocks.append(0)
                room = BLOCK
            blocks[-1] = crc32(rest[:room], blocks[-1])
            rest, room = rest[room:], room - min(room, len(rest))
    shapes = np.array(sizes, np.int64).reshape(-1, 2)
    lengths = shapes.prod(1) * 3
    return np.column_stack([np.cumsum(lengths) - lengths, shapes]), bad, blocks if lengths.any() else []


@contextmanager
def _results(dataset: Dataset, jobs: list[range], estimate: int) -> Iterator[Iterator[_Decoded]]:
    """The decoded jobs in order, by as many processes as are worthwhile, with a bar on a terminal."""
    task = _Decode(dataset)
    count = min(allowed_cores(), len(jobs)) if estimate >= _INLINE_BYTES else 0
    if count < 2:
        yield _shown(map(task, jobs), len(dataset))
        return
    with Workers(
        task, count, lambda job: f"images {dataset.names[job[0]]} to {dataset.names[job[-1]]}"
    ) as workers:
        yield _shown(workers.map(jobs), len(dataset))


def _shown(results: Iterator[_Decoded], total: int) -> Iterator[_Decoded]:
    console = Console(stderr=True)
    if not has_bars():
        log.info("Decoding %s images into a cache", f"{total:,}")
    columns = (
        TextColumn("Decoding images into a cache"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not has_bars(), transient=True) as progress:
        bar = progress.add_task("", total=total)
        for done in results:
            yield done
            progress.advance(bar, len(done.sizes))
