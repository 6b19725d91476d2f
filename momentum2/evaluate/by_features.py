"""Judging a network by the features of both splits alone."""

from collections.abc import Callable

from torch import Tensor

from momentum2.backbones import Encoder
from momentum2.data.dataset import Subset
from momentum2.data.sampler import seeded_subset
from momentum2.evaluate.accuracy import measure
from momentum2.evaluate.subject import Subject
from momentum2.runs.results import Accuracy

#: (n, d) training features and (n,) labels on the CPU, (m, d) test features, number of classes -> (m, classes) scores.
Classify = Callable[[Tensor, Tensor, Tensor, int], Tensor]

#: More would hardly move a floor, and the pixels of ImageNet would not fit into the memory of a GPU.
FLOOR_IMAGES = 100_000


def judge(
    subject: Subject, classify: Classify, encoder: Encoder | None = None, limit: int | None = None
) -> Accuracy:
    """The accuracy of `classify` on the features of the subject's encoder, or of another one.

    Args:
        limit: Learn from at most this many training images, a seeded choice.
    """
    data = subject.labeled
    images = data.train
    if limit is not None and len(images) > limit:
        images = Subset(images, seeded_subset(len(images), subject.options.seed, limit))
    train, test = subject.features(images, encoder), subject.features(data.test, encoder)
    assert train.labels is not None
    assert test.labels is not None
    queries = test.features.to(subject.device)
    scores = classify(train.features, train.labels, queries, len(data.class_names)).cpu()
    return measure(scores, test.labels, data.class_names, subject.options.seed)


def judge_floors(subject: Subject, classify: Classify) -> dict[str, float]:
    """top1 of the built-in baselines by the same means, learned from at most `FLOOR_IMAGES` images."""
    return {name: judge(subject, classify, encoder, FLOOR_IMAGES).top1 for name, encoder in subject.floors()}
