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
    """Votes of the k nearest neighbors, (m, classes) float64, on the device of the features.

    A neighbor at cosine similarity s votes for its class with weight exp(s / temperature), here divided by
    exp(1 / temperature), which no comparison notices. Of equally similar ones the first is nearer.

    Args:
        bank: (n, d) features whose classes are known.
        bank_labels: (n,) int64.
        queries: (m, d) features to classify.
    """
    if not 1 <= k <= len(bank):
        raise SettingError("k", f"must be from 1 to {len(bank):,}, the number of training images, not {k}.")
    if temperature <= 0:
        raise SettingError("temperature", f"must be above 0, not {temperature:g}.")
    bank, labels = F.normalize(bank.float(), dim=1), bank_labels.to(bank.device)
    parts = []
    for block in F.normalize(queries.float(), dim=1).split(max(1, _BLOCK // len(bank))):
        nearest, order = _top(block @ bank.T, k)  # b×k, nearest first
        weights, voted = ((nearest.double() - 1) / temperature).exp(), labels[order]
        votes = torch.zeros(len(block), classes, dtype=torch.float64, device=bank.device)
        rows = torch.arange(len(block), device=bank.device)
        for j in range(k):  # in this order, so that sums are the same bits on every device
            votes[rows, voted[:, j]] += weights[:, j]
        parts.append(votes)
    return torch.cat(parts)


def _top(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and where they are; among equals at the edge, the first."""
    values, order = similarity.topk(min(k + 1, similarity.shape[1]))
    if values.shape[1] > k:
        tied = values[:, k - 1] == values[:, k]  # topk chose any; elsewhere equals decide nothing
        if tied.any():
            again = similarity[tied].sort(dim=1, descending=True, stable=True)
            order[tied] = again.indices[:, : k + 1]
    return values[:, :k], order[:, :k]
