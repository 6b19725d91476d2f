"""The images whose features are nearest to those of a given one: exact, by a matrix product with all of them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from momentum2.config import Count, DataConfig, Network, Stem, Width
from momentum2.data import Dataset
from momentum2.data.folders import Files
from momentum2.data.images import Array, BadImage, Picture, Reading
from momentum2.errors import UserError, shown
from momentum2.evaluate.embed import Embeddings, encoder_digest
from momentum2.evaluate.subject import Subject, SubjectOptions, data_of

_ROWS = 65_536  # of the features that are compared at a time


@dataclass(frozen=True)
class SearchOptions:
    """What is found, and by which network.

    Args:
        count: Images to find.
        network: teacher or student (default: the one that the run exports).
        backbone: Architecture of a state dict from elsewhere; that of a ResNet is detected.
        stem: Stem of a state dict from elsewhere.
        width: Width of a state dict from elsewhere.
        device: auto, cpu, cuda, cuda:1, mps.
        threads: CPU threads (default: torch's).
    """

    count: Count = 12
    network: Network | None = None
    backbone: str | None = None
    stem: Stem | None = None
    width: Width | None = None
    device: str = "auto"
    threads: Count | None = None


@dataclass(frozen=True)
class Neighbors:
    """The images nearest to one image, nearest first.

    Args:
        image: The image that was searched for.
        names: Names of the images found.
        similarity: (k,) cosine similarity of their features to those of the image, at most 1.
        indices: (k,) their rows in the features.
    """

    image: str
    names: list[str]
    similarity: NDArray[np.float32]
    indices: NDArray[np.int64]


class _Query(Dataset):
    """One image, read as those of the features were: the same image has the same features then."""

    def __init__(self, name: str, how: str, reading: Reading) -> None:
        super().__init__([name])
        file = Files(Path(), [name], None, None)
        self.reading = file.reading = reading
        encoded = file.picture(0)
        pixels = encoded.pixels()  # a `BadImage` now if it is one
        self.image: Picture = encoded if how == "files" else Array(pixels)
        self.fixed_size = encoded.size if how == "one size" else None

    def picture(self, index: int) -> Picture:
        return self.image

    def stamp(self, index: int) -> str:
        return self.names[index]


def as_it_saw_them(
    source: str | os.PathLike[str], features: Embeddings, options: SearchOptions
) -> SubjectOptions:
    """Settings with which the encoder sees new images as it saw those of the features."""
    size = features.origin.image_size if features.origin else data_of(source).image_size
    data, o = DataConfig("list", image_size=size, cache="off", workers=0), options
    return SubjectOptions(
        data, o.network, "given", o.backbone, o.stem, o.width, device=o.device, threads=o.threads
    )


def search(subject: Subject, images: Sequence[str], features: Embeddings, count: int) -> list[Neighbors]:
    """The nearest neighbors of image files among the images of `features`.

    Features of other weights are refused: similarities between the spaces of two networks mean nothing.
    """
    how = features.origin.reading if features.origin else "files"
    queries = []
    for name in images:
        try:
            queries.append(_Query(name, how, subject.card.reading))
        except BadImage as reason:
            raise UserError(f"{shown(name)} cannot be read as an image ({reason}).") from None
    if features.origin is not None and features.origin.encoder != encoder_digest(subject):
        raise UserError(
            "The features were made with different weights, so nothing can be compared. Pass the run that made "
            "them, or write them again with momentum2 embed."
        )
    x = torch.cat([subject.features(query).features for query in queries])
    if x.shape[1] != features.features.shape[1]:
        raise UserError(
            f"The features have {features.features.shape[1]:,} numbers per image, but this encoder makes "
            f"{x.shape[1]:,}. Pass the run that made them."
        )
    k = min(count, len(features.names))
    similarity, order = nearest_rows(x, torch.from_numpy(features.features), k)
    return [
        Neighbors(image, [features.names[i] for i in found.tolist()], s.numpy(), found.numpy())
        for image, s, found in zip(images, similarity, order, strict=True)
    ]


def nearest_rows(queries: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosine similarity and place of the k rows of x (n, d) nearest to each query (m, d): (m, k) each.

    Nearest first; of equally near ones the first row.
    """
    unit = F.normalize(queries.float(), dim=1)
    similarity = torch.cat([F.normalize(rows, dim=1) @ unit.T for rows in x.split(_ROWS)]).T  # m×n
    best = similarity.sort(dim=1, descending=True, stable=True)
    return best.values[:, :k].clamp(max=1), best.indices[:, :k]
