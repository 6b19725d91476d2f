"""Judging a network by the features of both splits alone."""

from collections.abc import Callable

from torch import Tensor

from momentum2.backbones import Encoder
from momentum2.evaluate.results import Accuracy, measure
from momentum2.evaluate.subject import Subject

#: (n, d) training features, (n,) labels, (m, d) test features, number of classes -> (m, classes) scores.
Classify = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def judge(subject: Subject, classify: Classify, encoder: Encoder | None = None) -> Accuracy:
    """The accuracy of `classify` on the features of the subject's encoder, or of another one."""
    data, device = subject.labelled, subject.device
    train, test = subject.features(data.train, encoder), subject.features(data.test, encoder)
    assert train.labels is not None
    assert test.labels is not None
    x, y, queries = train.features.to(device), train.labels.to(device), test.features.to(device)
    scores = classify(x, y, queries, len(data.class_names)).cpu()
    return measure(scores, test.labels, data.class_names, subject.options.seed)


def judge_floors(subject: Subject, classify: Classify) -> dict[str, float]:
    """top1 of the built-in baselines by the same means."""
    return {name: judge(subject, classify, encoder).top1 for name, encoder in subject.floors()}
