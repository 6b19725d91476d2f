"""Linear evaluation: how much a linear classifier gets out of frozen features."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from momentum2 import distributed
from momentum2.config import Batch, Count, NotNegative, Resume
from momentum2.evaluate.accuracy import measure, top1_top5
from momentum2.evaluate.by_features import judge, judge_floors
from momentum2.evaluate.classifier import classifier_config, run_directory, train_classifier
from momentum2.evaluate.features import evaluating
from momentum2.evaluate.logistic import probe
from momentum2.evaluate.protocols import PROTOCOLS, ProtocolName, default_lr, result_name
from momentum2.evaluate.subject import Subject
from momentum2.methods import Supervised
from momentum2.runs.metrics import read_metrics
from momentum2.runs.names import METRICS
from momentum2.runs.results import Result, Settings


@dataclass(frozen=True)
class LinearOptions:
    """How the linear classifier is trained.

    Args:
        protocol: That of the paper, MoCo, SimSiam or BYOL, on random crops; cached uses center crops and takes seconds.
        epochs: Passes over the training images (default: the protocol's).
        batch_size: Images per step, over all processes (default: the protocol's).
        lr: Learning rate per 256 images (default: the protocol's; paper: 0.2, but 0.5 on stl10, cifar and shapes).
        floors: Also measure an untrained network, raw pixels and whitened patches, cached, on at most 100,000 images.
        out: Run directory of the head (default: beside the weights).
        resume: auto: resume or start. never: only start. must: only resume.
    """

    protocol: ProtocolName | Literal["cached"] = "paper"
    epochs: Count | None = None
    batch_size: Batch | None = None
    lr: NotNegative | None = None
    floors: bool = True
    out: str | None = None
    resume: Resume = "auto"


def evaluate_linear(subject: Subject, options: LinearOptions | None = None) -> Result | None:
    """Accuracy of a linear classifier on the frozen encoder; None if a signal stopped its training."""
    o = options or LinearOptions()
    return _cached(subject, o.floors) if o.protocol == "cached" else _trained(subject, o.protocol, o)


def _cached(subject: Subject, floors: bool) -> Result:
    classify = partial(probe, seed=subject.options.seed)
    return Result(
        result_name("cached"),
        subject.data_name,
        subject.name,
        judge(subject, classify),
        judge_floors(subject, classify) if floors else {},
        subject.settings,
    )


def _trained(subject: Subject, name: ProtocolName, o: LinearOptions) -> Result | None:
    data, protocol = subject.labeled, PROTOCOLS[name]
    epochs = protocol.epochs if o.epochs is None else o.epochs
    batch_size = protocol.batch_size if o.batch_size is None else o.batch_size
    lr = default_lr(name, subject.options.data.name) if o.lr is None else o.lr
    optim = replace(protocol.optim, lr=lr)
    config = classifier_config(subject, data.train, True, epochs, batch_size, optim, protocol.norm)
    out = run_directory(subject, result_name(name), o.out)
    test = subject.features(data.test)  # of a frozen encoder: the same in every epoch
    assert test.labels is not None
    labels = test.labels

    @torch.no_grad()
    def scores(method: Supervised) -> Tensor:
        with evaluating(method):
            return method.head(test.features.to(subject.device)).cpu()  # type: ignore[no-any-return]

    def validate(method: Supervised) -> dict[str, float]:
        top1, top5 = top1_top5(scores(method), labels)
        return {"top1": top1, "top5": top5}

    method = train_classifier(subject, config, data.train, out, o.resume, validate)
    if method is None:
        return None
    accuracy = measure(scores(method), labels, data.class_names, subject.options.seed)
    settings = subject.settings | {"epochs": epochs, "batch size": batch_size, "lr": lr}
    if distributed.is_main():
        settings |= _best(out, len(data.train) // batch_size)
    floors = judge_floors(subject, partial(probe, seed=subject.options.seed)) if o.floors else {}
    cached = {f"{name} (cached)": top1 for name, top1 in floors.items()}
    return Result(result_name(name), subject.data_name, subject.name, accuracy, cached, settings)


def _best(out: Path, steps_per_epoch: int) -> Settings:
    """The best epoch on the test images: printed because others do, but the last one counts."""
    epochs = [r for r in read_metrics(out / METRICS) if "top1" in r and r["step"]]
    best = max(epochs, key=lambda r: float(r["top1"]))
    return {"best epoch": best["step"] / steps_per_epoch, "top-1 of the best epoch": best["top1"]}
