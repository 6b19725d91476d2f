"""Features of a whole data set: every image once, in order, on any number of processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.augment import ViewSpec, render
from momentum2.backbones import Encoder
from momentum2.config import Precision
from momentum2.data import Batch, Dataset, iterate
from momentum2.errors import SettingError
from momentum2.machine import memory
from momentum2.seeds import derive
from momentum2.terminal import progress
from momentum2.training.device import computing_in


@dataclass(frozen=True)
class Features:
    """What an encoder makes of n images, on the CPU, in the order of the data set.

    Args:
        features: (n, d) float32.
        indices: (n,) int64, which images these are; unreadable ones are left out.
        labels: (n,) int64, or None if the data set has none.
    """

    features: Tensor
    indices: Tensor
    labels: Tensor | None


@torch.no_grad()
def extract(
    encoder: Encoder,
    dataset: Dataset,
    spec: ViewSpec,
    *,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    precision: Precision = "fp32",
    workers: int | None = None,
) -> Features:
    """The features of all images, the same on every process; the encoder computes in evaluation mode.

    Batch j is always images [j·B, (j+1)·B) and goes to process j mod world: one process and many compute the
    very same batches, and the result is the same to the last bit.
    """
    device = torch.device(device)
    _check_memory(min(batch_size, len(dataset)), spec.size, device)
    rank, world = distributed.rank(), distributed.world_size()
    batches = np.array_split(np.arange(len(dataset)), range(batch_size, len(dataset), batch_size))
    ours = np.concatenate([np.empty(0, np.int64), *batches[rank::world]])
    read = iterate(dataset, spec, batch_size, indices=ours, device=device, workers=workers)
    features, kept, n = torch.empty(len(dataset), encoder.feature_dim), list[Tensor](), 0
    with evaluating(encoder), progress("Computing features", len(dataset), "images") as advance:
        for _ in range(0, len(batches), world):
            batch = next(read, None)  # none where others have the last batches
            x, indices = torch.empty(0, encoder.feature_dim, device=device), torch.empty(0, dtype=torch.int64)
            if batch is not None and len(batch):
                with computing_in(precision, device):
                    x = encoder(_view(batch, spec)).float()
                indices = batch.indices
            x = distributed.gather(x, even=False)
            features[n : n + len(x)] = x
            n += len(x)
            kept.append(distributed.gather(indices.to(device), even=False).cpu())
            advance(batch_size * world)
    found = torch.cat(kept)
    labels = None if dataset.labels is None else torch.from_numpy(dataset.labels)[found]
    return Features(features[:n], found, labels)


def _check_memory(images: int, size: int, device: torch.device) -> None:
    """Refuse a batch that this machine cannot hold, before any of it is read."""
    needs = images * size**2 * 3 * 4 * 4  # float32, and what the first layers make of it
    if device.type == "cpu" and needs > memory():
        raise SettingError(
            "feature_batch",
            f"needs more memory than this machine has: {images:,} images of {size:,} pixels are {needs / 1e9:,.0f} GB. "
            "Lower it, or data.image_size.",
        )


def shuffled_views(
    dataset: Dataset,
    spec: ViewSpec,
    *,
    seed: int,
    limit: int | None = None,
    device: torch.device | str = "cpu",
    workers: int | None = None,
) -> Iterator[Tensor]:
    """Images as the encoder sees them, (n, 3, size, size), in a seeded order, the same on every process.

    For statistics of batches: a folder has its images class by class, and a batch of one may have no variance.
    """
    words = np.random.Philox(derive(seed, "views")).random_raw(len(dataset))
    order = np.argsort(words, kind="stable")[:limit]
    size = 255 if len(order) % 256 == 1 else 256
    for batch in iterate(dataset, spec, size, indices=order, device=device, workers=workers):
        yield _view(batch, spec)


def _view(batch: Batch, spec: ViewSpec) -> Tensor:
    return render(batch.images, batch.draws, (spec,), channels_last=True)[0]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and each layer's own mode again after it."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
