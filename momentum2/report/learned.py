"""What an encoder makes of some images: a map of them, their nearest neighbors, and what those would vote."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from momentum2.backbones import Encoder
from momentum2.config import Limits
from momentum2.data import open_dataset
from momentum2.data.dataset import Ints, Subset
from momentum2.data.sampler import seeded_subset
from momentum2.errors import SettingError, UserError, called
from momentum2.evaluate.features import extract
from momentum2.report.sprites import Sprites, draw_sprites
from momentum2.runs.encoder import load_encoder
from momentum2.runs.handle import Snapshot
from momentum2.training.device import choose_device

Map = Literal["pca", "tsne"]

#: Neighbors that the gallery shows.
SHOWN = 8
_BLOCK = 1024  # rows of similarities in memory at a time


@dataclass(frozen=True)
class ReportOptions:
    """What the report looks at.

    Args:
        points: Images on the map.
        map: How features become a map: pca, or tsne (needs the tsne extra).
    """

    points: Annotated[int, Limits(3, 10**5)] = 2000
    map: Map = "pca"


@dataclass(frozen=True)
class Learned:
    """n images as an encoder sees them.

    Args:
        what: Which images these are, in words.
        how: How the map was made, in words.
        names: What they are called.
        xy: (n, 2) places on the map, between 0 and 1.
        neighbors: (n, SHOWN or fewer) the nearest of the others, nearest first.
        sprites: Their thumbnails.
        class_names: What labels mean; None without labels.
        labels: (n,) classes, or None.
        predicted: (n,) what the neighbors vote, or None.
        k: Number of neighbors that vote.
    """

    what: str
    how: str
    names: list[str]
    xy: NDArray[np.float64]
    neighbors: Ints
    sprites: Sprites
    class_names: tuple[str, ...] | None
    labels: Ints | None
    predicted: Ints | None
    k: int


def look(run: Snapshot, options: ReportOptions) -> Learned:
    """Show a run's encoder its test images or, if it has none, those it was trained on.

    This computes in one process, whatever the run did.
    """
    tested = run.config.eval_data.name != "none"
    data = run.config.eval_data if tested else run.config.data
    loaded = load_encoder(run.directory)
    with called({"data.": "eval_data."} if tested else {}):
        whole = open_dataset(
            replace(data, cache="off", download=False), data.test_split if tested else data.split
        )
    count = min(options.points, len(whole))
    dataset = Subset(whole, np.sort(seeded_subset(len(whole), 0, count)))
    device = choose_device("auto")
    encoder = cast(Encoder, loaded.encoder.to(device))
    found = extract(
        encoder, dataset, replace(loaded.card.view, size=data.image_size), device=device, workers=data.workers
    )
    if len(found.features) < 3:
        raise UserError(f"A map needs at least 3 images, but only {len(found.features)} could be read.")
    x = F.normalize(found.features, dim=1)
    k = min(run.config.monitor.knn_k, len(x) - 1)
    order, similarity = nearest(x, min(max(k, SHOWN), len(x) - 1))
    xy, how = project(x, options.map)
    labels = found.labels
    return Learned(
        what=f"{len(x):,} of the {len(whole):,} {'test' if tested else 'training'} images",
        how=how,
        names=[dataset.names[i] for i in found.indices.tolist()],
        xy=xy,
        neighbors=order[:, :SHOWN].numpy(),
        sprites=draw_sprites(dataset, found.indices.tolist(), data.image_size),
        class_names=None if labels is None else dataset.class_names,
        labels=None if labels is None else labels.numpy(),
        predicted=None if labels is None else vote(labels, order[:, :k], similarity[:, :k], run).numpy(),
        k=k,
    )


def nearest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k rows most similar to each row of x (n, d), itself left out, and how similar they are: (n, k) both."""
    orders, values = [], []
    for start in range(0, len(x), _BLOCK):
        similarity = x[start : start + _BLOCK] @ x.T
        similarity[torch.arange(len(similarity)), torch.arange(start, start + len(similarity))] = -torch.inf
        best = similarity.topk(k)
        orders.append(best.indices)
        values.append(best.values)
    return torch.cat(orders), torch.cat(values)


def vote(labels: Tensor, order: Tensor, similarity: Tensor, run: Snapshot) -> Tensor:
    """(n,) the class that neighbors (n, k) vote for, weighted as in the run's online kNN."""
    weights = ((similarity.double() - 1) / run.config.monitor.knn_temperature).exp()
    votes = torch.zeros(len(order), int(labels.max()) + 1, dtype=torch.float64)
    return votes.scatter_add_(1, labels[order], weights).argmax(1)


def project(x: Tensor, how: Map) -> tuple[NDArray[np.float64], str]:
    """Places of unit-length features (n, d) on a map, (n, 2) between 0 and 1, and how they were found."""
    x = x.double() - x.double().mean(0)
    variances, directions = torch.linalg.eigh(x.T @ x)
    directions = directions.flip(1)[:, :50]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    components = (x @ (directions * largest.sign())).numpy()
    if how == "tsne":
        places, words = (
            _tsne(components),
            "t-SNE of the features: nearby images are similar; large distances mean little",
        )
    else:
        share = float(variances[-2:].sum() / variances.sum().clamp_min(1e-30))
        places, words = (
            components[:, :2],
            f"PCA: the two directions of largest variance, {share:.0%} of it all",
        )
    low, high = places.min(0), places.max(0)
    return (places - low) / np.maximum(high - low, 1e-12), words


def check_map(how: Map) -> None:
    """Refuse a map that needs a package which is not there."""
    if how == "tsne":
        try:
            import openTSNE  # noqa: F401
        except ImportError:
            raise SettingError(
                "map", "tsne needs openTSNE. Run pip install 'momentum2[tsne]', or use pca."
            ) from None


def _tsne(components: NDArray[np.float64]) -> NDArray[np.float64]:
    from openTSNE import TSNE

    return np.asarray(TSNE(perplexity=min(30, (len(components) - 1) / 3), random_state=0).fit(components))


def confusion(learned: Learned) -> Ints:
    """(classes, classes) number of images of each class (row) that were taken for each class (column)."""
    assert learned.class_names is not None
    assert learned.labels is not None
    assert learned.predicted is not None
    counts = np.zeros((len(learned.class_names),) * 2, np.int64)
    np.add.at(counts, (learned.labels, learned.predicted), 1)
    return counts


def queries(learned: Learned, count: int = 12) -> list[int]:
    """Images for the gallery, taken from all classes alike."""
    labels = np.zeros(len(learned.names), np.int64) if learned.labels is None else learned.labels
    seen: dict[int, int] = {}
    turn = []  # how many of its class come before an image
    for label in labels.tolist():
        turn.append(seen.get(label, 0))
        seen[label] = turn[-1] + 1
    ordered = np.lexsort((labels, np.array(turn)))[: max(count, len(seen))]
    chosen = np.unique(np.linspace(0, len(ordered) - 1, min(count, len(ordered))).astype(int))
    return [int(i) for i in ordered[chosen]]
