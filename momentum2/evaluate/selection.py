"""Which images of many to look at or to keep, by their features: exact comparisons, no index, one process.

Similarity is the cosine. n images with d features each take about n²·d multiplications for duplicates and outliers, and
count·n·d for diverse ones; memory is that of the features twice, and some hundred megabytes.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from momentum2.config import Count, Limits
from momentum2.errors import SettingError
from momentum2.evaluate.embed import Embeddings
from momentum2.seeds import derive
from momentum2.settings import check

By = Literal["duplicates", "outliers", "diverse"]

_TILE = 4096  # rows and columns of the similarities that are in memory at a time


@dataclass(frozen=True)
class SelectOptions:
    """What is selected.

    Args:
        by: duplicates (images that repeat an earlier one), outliers (images unlike all others, most unlike first),
            or diverse (images that cover all others).
        similarity: Images count as duplicates from this cosine similarity on; which one fits depends on the encoder.
        count: Number of outliers, or of diverse images.
        k: An outlier is judged by its similarity to its k-th nearest image.
        seed: Seed of the first of the diverse images.
    """

    by: By | None = None
    similarity: Annotated[float, Limits(-1, 1)] = 0.99
    count: Count = 100
    k: Count = 5
    seed: int = 0


@dataclass(frozen=True)
class Selection:
    """The selected images, m of n.

    Args:
        by: How they were selected.
        indices: (m,) their rows in the features.
        names: Their names.
        similarity: (m,) float32. duplicates: to `like`. outliers: to `like`, the k-th nearest. diverse: to the most
            similar image chosen before, `like`; the first has -1.
        like: (m,) rows in the features, as above; for the first diverse image, its own.
        rest: (n - m,) rows of all other images.
    """

    by: By
    indices: NDArray[np.int64]
    names: list[str]
    similarity: NDArray[np.float32]
    like: NDArray[np.int64]
    rest: NDArray[np.int64]


def select(features: Embeddings, options: SelectOptions) -> Selection:
    """Select images by their features."""
    check(options)
    o, n = options, len(features.names)
    x = F.normalize(torch.from_numpy(features.features), dim=1)
    if o.by == "duplicates":
        indices, similarity, like = duplicates(x, o.similarity)
    elif o.by == "outliers":
        if o.k >= n:
            raise SettingError("k", f"must be from 1 to {n - 1:,}, the number of other images, not {o.k:,}.")
        indices, similarity, like = outliers(x, o.k, min(o.count, n))
    elif o.by == "diverse":
        indices, similarity, like = diverse(x, min(o.count, n), derive(o.seed, "select") % n)
    else:
        raise SettingError("by", f"is not set. Choose one of {', '.join(get_args(By))}.")
    rest = np.setdiff1d(np.arange(n), indices.numpy())
    names = [features.names[i] for i in indices.tolist()]
    return Selection(o.by, indices.numpy(), names, similarity.numpy(), like.numpy(), rest)


def duplicates(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of unit length x (n, d) that repeat an earlier one: (m,) each of rows, similarities, and which is repeated.

    In their order, each row is kept unless its similarity to a kept one is at least `threshold`. So no two kept ones
    are that similar, and each other one is that similar to a kept one; the most similar of them is named, or the first.
    """
    n = len(x)
    best, like = torch.full((n,), -torch.inf), torch.arange(n)
    kept: list[Tensor] = []  # rows that are kept, a tensor for each block
    for start in range(0, n, _TILE):
        block = x[start : start + _TILE]
        high, which = torch.full((len(block),), -torch.inf), torch.zeros(len(block), dtype=torch.int64)
        for rows in kept:
            _keep_larger(high, which, block @ x[rows].T, rows)
        within, repeated = block @ block.T, high >= threshold
        # Most rows repeat nothing: only those that are similar to an earlier one of the block are looked at in turn.
        close = (within >= threshold).tril(-1).any(1)
        for i in torch.arange(len(block))[~repeated & close].tolist():
            before = torch.arange(i)[~repeated[:i]]
            repeated[i] = bool((within[i, before] >= threshold).any())
        new = torch.arange(len(block))[~repeated]
        if len(new):
            earlier = within[:, new].masked_fill(new >= torch.arange(len(block))[:, None], -torch.inf)
            _keep_larger(high, which, earlier, new + start)
            kept.append(new + start)
        best[start : start + len(block)] = torch.where(repeated, high, -torch.inf)
        like[start : start + len(block)] = torch.where(
            repeated, which, torch.arange(start, start + len(block))
        )
    found = torch.arange(n)[best > -torch.inf]
    return found, best[found].clamp(max=1), like[found]


def _keep_larger(high: Tensor, which: Tensor, similarity: Tensor, rows: Tensor) -> None:
    """Enter the largest of each row of `similarity` (b, r) where it is above `high` (b,), and in `which` its row."""
    place = similarity.argmax(1)
    value = similarity[torch.arange(len(similarity)), place]
    larger = value > high
    high[larger], which[larger] = value[larger], rows[place[larger]]


def outliers(x: Tensor, k: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of unit length x (n, d) whose k-th nearest other row is least similar, the least first.

    Returns (count,) each of rows, that similarity, and that other row (Ramaswamy, Rastogi and Shim, 2000).
    """
    n = len(x)
    values, places = torch.empty(n), torch.empty(n, dtype=torch.int64)
    for start in range(0, n, _TILE):
        block = x[start : start + _TILE]
        rows = torch.arange(len(block))
        best, where = torch.full((len(block), 0), 0.0), torch.empty(len(block), 0, dtype=torch.int64)
        for left in range(0, n, _TILE):
            similarity = block @ x[left : left + _TILE].T
            if left == start:
                similarity[rows, rows] = -torch.inf  # itself
            columns = torch.arange(left, left + similarity.shape[1]).expand(len(block), -1)
            best, order = torch.cat([best, similarity], 1).topk(min(k, best.shape[1] + similarity.shape[1]))
            where = torch.cat([where, columns], 1).gather(1, order)
        values[start : start + len(block)] = best[:, k - 1]
        places[start : start + len(block)] = where[:, k - 1]
    order = values.argsort(stable=True)[:count]
    return order, values[order].clamp(max=1), places[order]


def diverse(x: Tensor, count: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of unit length x (n, d), each the one least similar to those before it, beginning with `first`.

    Every row is then at most twice as far from a chosen one as the best choice of `count` rows could make it (Gonzalez,
    1985). Returns (count,) each of rows, similarities to the nearest before, and which that is.
    """
    nearest, like = torch.full((len(x),), -torch.inf), torch.full((len(x),), first)
    chosen, similarity, seen = list[int](), list[float](), list[int]()
    row = first
    for _ in range(count):
        similarity.append(float(nearest[row]) if chosen else -1.0)
        seen.append(int(like[row]))
        chosen.append(row)
        found = x @ x[row]
        closer = found > nearest
        nearest[closer], like[closer] = found[closer], row
        nearest[row] = torch.inf  # chosen: never again
        row = int(nearest.argmin())
    return torch.tensor(chosen), torch.tensor(similarity).clamp(max=1), torch.tensor(seen)
