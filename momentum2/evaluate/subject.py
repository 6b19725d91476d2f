"""What is evaluated, and on what: an encoder from any source, and labeled images."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2.augment import ViewSpec, view_specs
from momentum2.backbones import Encoder
from momentum2.backbones.fit import Unfit, measure
from momentum2.config import (
    OWN,
    Batch,
    DataConfig,
    Limits,
    ModelConfig,
    Network,
    Precision,
    Stem,
    ViewsConfig,
    Width,
)
from momentum2.data import Dataset, open_dataset
from momentum2.distributed.together import joined
from momentum2.errors import SettingError, UserError, called
from momentum2.evaluate.features import Features, extract
from momentum2.evaluate.floors import Pixels, calibrate, patch_encoder, random_encoder, started_encoder
from momentum2.files import real
from momentum2.runs.card import EncoderCard, read_card
from momentum2.runs.encoder import LoadedEncoder, load_encoder
from momentum2.runs.names import CONFIG, START
from momentum2.runs.results import PATCHES, PIXELS, RANDOM, STARTED, Settings, recalibrated
from momentum2.settings import check, config_from_file
from momentum2.training.device import choose_device

FloorName = Literal["start", "random", "pixels", "patches"]
Weights = Literal["given", FloorName]


@dataclass(frozen=True)
class SubjectOptions:
    """Which network is evaluated on which images.

    Args:
        data: Labeled images: split to learn from, test_split to test on (default: the run's eval_data).
        network: teacher or student (default: the one that the run exports).
        weights: given, or a floor: what an adapted run started from (start), the untrained network (random), raw pixels
            (pixels) or whitened patches (patches).
        backbone: Architecture of a state dict from elsewhere; that of a ResNet is detected.
        stem: Stem of a state dict from elsewhere.
        width: Width of a state dict from elsewhere.
        feature_batch: Images per batch when only features are computed.
        precision: auto is bf16 or fp16 on GPUs that have it, else fp32.
        device: auto, cpu, cuda, cuda:1, mps.
        threads: CPU threads per process (default: torch's); it affects the last bits of the results.
        seed: Seed of every random choice.
        recalibrate: Measure the batch-norm statistics again first, on up to 10,000 training images.
    """

    data: DataConfig = field(default_factory=lambda: DataConfig(name="none"))
    network: Network | None = None
    weights: Weights = "given"
    backbone: str | None = None
    stem: Stem | None = None
    width: Width | None = None
    feature_batch: Batch = 256
    precision: Precision = "fp32"
    device: str = "auto"
    threads: Annotated[int, Limits(1, 1024)] | None = None
    seed: int = 0
    recalibrate: bool = False


@dataclass(frozen=True)
class Labeled:
    """Training and test images with one numbering of the classes."""

    train: Dataset
    test: Dataset
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class Subject:
    """An encoder on its device, with the data to evaluate it on.

    Args:
        encoder: The network, or a floor.
        name: What it is called in results: teacher, student, a file's name, or a floor.
        card: Architecture and preprocessing of the given weights.
        directory: Where the weights are, and results go.
        options: As given, with the data filled in.
        device: Where it computes.
    """

    encoder: Encoder
    name: str
    card: EncoderCard
    directory: Path
    options: SubjectOptions
    device: torch.device

    @property
    def spec(self) -> ViewSpec:
        """The view that is shown in evaluation: the center, at the data's image size."""
        (shown,) = view_specs(ViewsConfig("evaluation"), self.options.data.image_size)
        return replace(shown, mean=self.card.mean, std=self.card.std)

    @property
    def model(self) -> ModelConfig:
        """The network, with the start that its run gave it where that is known."""
        config, card = self.directory / CONFIG, self.card
        start = config_from_file(config).model if config.exists() else ModelConfig()
        options = list(card.options) or None
        return replace(start, backbone=card.backbone, stem=card.stem, width=card.width, options=options)

    @property
    def data_name(self) -> str:
        data = self.options.data
        kind = (
            real(Path(data.root)).name
            if data.root and data.name in ("folder", "archive", "list")
            else data.name
        )
        return f"{kind} {data.test_split}"

    @property
    def settings(self) -> Settings:
        """What every evaluation of it depends on."""
        o = self.options
        return {
            "image size": o.data.image_size,
            "training images": len(self.labeled.train),
            "steps": self.card.step,
            "precision": o.precision,
            "seed": o.seed,
        }

    @cached_property
    def images(self) -> Dataset:
        """The images of `data.split`."""
        return open_dataset(self.options.data, seed=self.options.seed)

    @cached_property
    def labeled(self) -> Labeled:
        """Those, and those of `data.test_split`, with their labels."""
        data = self.options.data
        _require_labels(self.images, "training")  # without them no division into splits would help
        return check_labels(self.images, open_dataset(data, data.test_split))

    def features(self, dataset: Dataset, encoder: Encoder | None = None) -> Features:
        """Features of a data set by this encoder, or by another one, on the CPU."""
        o = self.options
        return extract(
            encoder or self.encoder,
            dataset,
            self.spec,
            batch_size=o.feature_batch,
            device=self.device,
            precision=o.precision,
            workers=o.data.workers,
        )

    def floors(self) -> Iterator[tuple[str, Encoder]]:
        """The built-in baselines with their names; none for a floor itself."""
        if self.options.weights == "given":
            if (self.directory / START).exists():
                yield self.floor("start")
            if self.card.backbone != OWN:  # there is no untrained copy of a custom network
                yield self.floor("random")
            yield self.floor("pixels")
            yield self.floor("patches")

    def floor(self, weights: FloorName) -> tuple[str, Encoder]:
        o = self.options
        if weights == "start":
            given = self.encoder if self.card.backbone == OWN else None
            return STARTED, started_encoder(self.directory / START, self.device, given)
        if weights == "pixels":
            return PIXELS, Pixels(self.spec.size, self.card.channels)
        if weights == "patches":
            return PATCHES, patch_encoder(self.images, self.spec, o.seed, self.device, o.data.workers)
        return RANDOM, random_encoder(self.model, self.images, self.spec, o.seed, self.device, o.data.workers)


def data_of(source: str | os.PathLike[str]) -> DataConfig:
    """The evaluation data in a run's config.yaml; for a file on its own, kind "none" at its image size."""
    path = Path(source)
    config = _directory(path) / CONFIG
    if config.exists():
        run = config_from_file(config)
        # Somebody else's file must not make us download or write anywhere; what the user says still counts.
        run = replace(run, eval_data=replace(run.eval_data, download=False, cache_dir=None))
        unknown = replace(run.eval_data, image_size=run.data.image_size)
        return unknown if run.eval_data.name == "none" else run.eval_data
    card = read_card(path) if path.is_file() else None
    return DataConfig(name="none", image_size=card.image_size if card else 224)


@contextmanager
def open_subject(
    source: str | os.PathLike[str], options: SubjectOptions | None = None, encoder: nn.Module | None = None
) -> Iterator[Subject]:
    """Load what is evaluated; until the end of the block, processes of torchrun work together.

    Args:
        source: A run directory, one of its checkpoints, an `encoder.safetensors` or another file of weights.
        options: Its data of kind "none" stands for the run's own evaluation data.
        encoder: The network, where the run was started with a custom one.
    """
    options = options or SubjectOptions()
    check(options)
    with called({"train.": "", "optim.": ""}), joined(device := choose_device(options.device)):
        if options.threads:
            torch.set_num_threads(options.threads)
        loaded = load_encoder(source, options.network, options.backbone, options.stem, options.width, encoder)
        if options.data.name == "none":
            options = replace(options, data=data_of(source))
        if options.data.name == "none":
            raise SettingError(
                "data.name",
                f"is not set, and {source} has no evaluation data. Choose a data set and its root.",
            )
        network = cast(Encoder, loaded.encoder)
        if options.data.image_size != loaded.card.image_size and loaded.card.backbone != OWN:
            _check_size(loaded, options.data.image_size)
        network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        path, card = Path(source), loaded.card
        options = replace(options, data=_as_seen(options.data, card))
        subject = Subject(network, _name(path, card), card, _directory(path), options, device)
        if options.recalibrate and options.weights != "given":
            raise SettingError(
                "recalibrate", f"does not apply to weights {options.weights}. Leave one of them out."
            )
        if options.weights != "given":
            name, floor = subject.floor(options.weights)
            subject = replace(subject, encoder=floor, name=name)
        if options.recalibrate:
            if not any(isinstance(module, _BatchNorm) for module in network.modules()):
                raise SettingError("recalibrate", "does not apply: this network has no batch norm.")
            calibrate(network, subject.images, subject.spec, options.seed, device, options.data.workers)
            subject = replace(subject, name=recalibrated(subject.name))
        yield subject


def _as_seen(data: DataConfig, card: EncoderCard) -> DataConfig:
    """`data` read as the encoder has to see it; a window of other data, if one is given, stays."""
    seen = card.as_seen(data)
    return seen if data.window is None else replace(seen, window=data.window)


def _check_size(loaded: LoadedEncoder, size: int) -> None:
    """Refuse images of a size that a network does not take, as ViTs take that of their training alone."""
    card = loaded.card
    try:
        measure(loaded.encoder, (size,), card.channels, backward=False)
    except Unfit as unfit:
        raise SettingError(
            "data.image_size",
            f"{size} does not work with {card.backbone} ({unfit.args[1]}). It was trained at {card.image_size}.",
        ) from None


def _require_labels(dataset: Dataset, what: str) -> None:
    if len(dataset) == 0:
        raise UserError(f"There are no {what} images. Choose a split that has some.")
    if dataset.labels is None or dataset.class_names is None:
        raise UserError(
            f"The {what} images have no labels, which evaluation needs (embedding does not). Put each class in its "
            "own folder."
        )


def check_labels(train: Dataset, test: Dataset) -> Labeled:
    """Both data sets, if a classifier can be trained on one and tested on the other."""
    for dataset, what in ((train, "training"), (test, "test")):
        _require_labels(dataset, what)
    if train.class_names != test.class_names:
        raise UserError(
            f"The training images ({len(train.class_names or ())} classes) and the test images "
            f"({len(test.class_names or ())} classes) have different classes. Take both from one data set."
        )
    names, counts = train.class_names or (), np.bincount(test.labels)  # type: ignore[arg-type]
    unseen = np.setdiff1d(test.labels, train.labels)  # type: ignore[arg-type]
    if len(unseen):
        raise UserError(
            f"There is no training image of class {names[unseen[0]]}, which has {counts[unseen[0]]:,} test images. The "
            f"same holds for {len(unseen)} of {len(names)} classes. Add training images, or raise data.train_size."
        )
    return Labeled(train, test, train.class_names or ())


def _directory(source: Path) -> Path:
    """Where results go: the run's directory, also for its checkpoints; the directory of any other file."""
    if source.is_dir():
        return source if (source / CONFIG).exists() else source.parent.parent
    return source.parent


def _name(source: Path, card: EncoderCard) -> str:
    if card.network is None:
        return source.name
    whole_run = not source.is_dir() or (source / CONFIG).exists()
    return card.network if whole_run else f"{card.network} at step {card.step}"
