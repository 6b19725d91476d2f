"""Weighted k nearest neighbors: the accuracy of features without training anything."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.config import Count, Positive
from momentum2.errors import SettingError
from momentum2.evaluate.by_features import judge, judge_floors
from momentum2.evaluate.subject import Subject
from momentum2.runs.results import Result

_BLOCK = 2**25  # similarities that are in memory at a time
_BANK = 2**17  # features of the bank that are on the device at a time


@dataclass(frozen=True)
class KnnOptions:
    """How neighbors vote.

    Args:
        k: Number of neighbors that vote.
        temperature: A neighbor at cosine similarity s votes with weight exp(s / temperature).
        floors: Also measure an untrained network, raw pixels and whitened patches, on at most 100,000 training images.
    """

    k: Count = 20
    temperature: Positive = 0.07
    floors: bool = True


def evaluate_knn(subject: Subject, options: KnnOptions | None = None) -> Result:
    """Classify each test image by its nearest training images; nothing is trained."""
    o = options or KnnOptions()

    def classify(x: Tensor, y: Tensor, test: Tensor, classes: int) -> Tensor:
        return knn_scores(x, y, test, classes, o.k, o.temperature)

    return Result(
        "knn",
        subject.data_name,
        subject.name,
        judge(subject, classify),
        judge_floors(subject, classify) if o.floors else {},
        subject.settings | {"k": o.k, "temperature": o.temperature},
    )


def knn_scores(
    bank: Tensor, bank_labels: Tensor, queries: Tensor, classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Votes of the k nearest neighbors, (m, classes) float64, on the device of the queries.

    A neighbor at cosine similarity s votes for its class with weight exp(s / temperature), here divided by
    exp(1 / temperature), which no comparison notices. Of equally similar ones the first is nearer.

    Args:
        bank: (n, d) features whose classes are known; they may stay on the CPU.
        bank_labels: (n,) int64.
        queries: (m, d) features to classify.
    """
    if not 1 <= k <= len(bank):
        raise SettingError("k", f"must be from 1 to {len(bank):,}, the number of training images, not {k}.")
    if temperature <= 0:
        raise SettingError("temperature", f"must be above 0, not {temperature:g}.")
    device, labels = queries.device, bank_labels.to(queries.device)
    blocks = F.normalize(queries.float(), dim=1).split(max(1, _BLOCK // min(len(bank), _BANK)))
    # Of each block of queries, the nearest so far: b×k similarities, and which of the bank.
    nearest = [(block.new_empty(len(block), 0), labels.new_empty(len(block), 0)) for block in blocks]
    for start in range(0, len(bank), _BANK):
        known = F.normalize(bank[start : start + _BANK].to(device).float(), dim=1)
        for i, block in enumerate(blocks):
            values, order = (
                torch.cat(pair, 1) for pair in zip(nearest[i], _top(block @ known.T, k, start), strict=True)
            )
            values, kept = _top(values, k)
            nearest[i] = values, order.gather(1, kept)
    return torch.cat([_vote(values, labels[order], classes, temperature) for values, order in nearest])


def _vote(similarity: Tensor, labels: Tensor, classes: int, temperature: float) -> Tensor:
    """Votes b×classes of neighbors at these similarities, of these classes (b×k each)."""
    weights = ((similarity.double() - 1) / temperature).exp()
    votes = torch.zeros(len(labels), classes, dtype=torch.float64, device=labels.device)
    rows = torch.arange(len(labels), device=labels.device)
    for j in range(labels.shape[1]):  # in this order, so that sums are the same bits on every device
        votes[rows, labels[:, j]] += weights[:, j]
    return votes


def _top(similarity: Tensor, k: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """The k largest of each row (or all), largest first, and where they are, counted from `start`; equals in order."""
    values, order = similarity.topk(min(k + 1, similarity.shape[1]))
    if values.shape[1] > k:
        tied = values[:, k - 1] == values[:, k]  # topk chose any of them
        if tied.any():
            again = similarity[tied].sort(dim=1, descending=True, stable=True)
            order[tied] = again.indices[:, : k + 1]
    order = order[:, :k].sort(dim=1).values
    values, place = similarity.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, order.gather(1, place) + start
