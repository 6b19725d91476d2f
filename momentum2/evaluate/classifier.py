"""Training a classifier on labeled images, through the one loop: the linear head, or the whole network."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.backbones import Encoder
from momentum2.config import (
    Config,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    Resume,
    TrainConfig,
    ViewsConfig,
)
from momentum2.data import Dataset
from momentum2.evaluate.subject import Subject
from momentum2.methods import Supervised
from momentum2.norms import convert_norms
from momentum2.runs.directory import open_run
from momentum2.runs.results import RANDOM
from momentum2.seeds import derive
from momentum2.training.build import make_job
from momentum2.training.loop import fit
from momentum2.training.plan import idle_settings, resolve
from momentum2.weights import on_cpu

Validate = Callable[[Supervised], dict[str, float]]


class Classifier(Encoder):
    """Encoder and head as one network, whose features are class scores."""

    def __init__(self, method: Supervised, classes: int) -> None:
        super().__init__()
        self.method, self.feature_dim = method, classes

    def forward(self, x: Tensor) -> Tensor:
        return self.method.head(self.method.encoder(x))  # type: ignore[no-any-return]


def run_directory(subject: Subject, evaluation: str, out: str | None) -> Path:
    """`out`, or by default a directory beside the weights."""
    beside = subject.directory / evaluation.replace(" ", "-")
    old = beside / "random-initialisation"  # as version 0.1 called it
    if not out and subject.name == RANDOM and old.exists():
        return old
    return Path(out or beside / subject.name.replace(" ", "-"))


def classifier_config(
    subject: Subject,
    images: Dataset,
    freeze: bool,
    epochs: int,
    batch_size: int,
    optim: OptimConfig,
    norm: bool = True,
) -> Config:
    """The whole run as a config, in which a digest of weights and image names stands for their place.

    Args:
        freeze: Train the classifier alone, which `norm` then gives a BN.
    """
    o, card = subject.options, subject.card
    return Config(
        method=MethodConfig("supervised", "synced", freeze_encoder=freeze, classifier_norm=norm),
        model=ModelConfig(
            card.backbone,
            card.stem,
            card.width,
            weights=_digest(subject.encoder, images),
            options=list(card.options) or None,
        ),
        data=o.data,
        views=ViewsConfig("supervised"),
        train=TrainConfig(
            epochs=epochs,
            batch_size=batch_size,
            precision=o.precision,
            seed=o.seed,
            checkpoint_every=max(1, len(images) // max(1, batch_size)),
            keep=1,
            device=o.device,
            threads=torch.get_num_threads(),
        ),
        optim=optim,
        # A frozen or supervised network may be as narrow as it likes: no alarms of collapse.
        monitor=MonitorConfig(knn_every=1, collapse_std=0.0, collapse_rank=0.0),
    )


def train_classifier(
    subject: Subject,
    config: Config,
    images: Dataset,
    out: Path,
    resume: Resume,
    validate: Validate | None = None,
) -> Supervised | None:
    """Train on `images` in the run directory `out`, validating every epoch; None if a signal stopped it."""
    plan = resolve(config, len(images), distributed.world_size())
    torch.manual_seed(derive(config.train.seed, "head"))
    encoder = copy.deepcopy(subject.encoder)
    method = Supervised(config, plan.schedule, encoder, plan.local_devices, len(subject.labeled.class_names))
    if any(isinstance(m, nn.BatchNorm1d) for m in method.head.modules()):
        convert_norms(method.head, "synced")  # so that the number of processes makes no difference
    method.to(subject.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    score = None if validate is None else lambda encoders, done: validate(method)
    with open_run(out, config, resume, idle_settings(config, Supervised)) as run:
        job = make_job(config, plan, method, images, out, subject.device, score)
        return method if fit(job, run) else None


def _digest(encoder: nn.Module, images: Dataset) -> str:
    digest = hashlib.sha256(safetensors.torch.save(on_cpu(encoder.state_dict())))
    for name in images.names:
        digest.update(name.encode("utf-8", "surrogateescape") + b"\n")
    return f"sha256:{digest.hexdigest()}"
