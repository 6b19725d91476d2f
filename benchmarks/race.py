"""A fair race: accuracy on CIFAR-10 (or any labeled images) after a budget of CPU seconds.

    python benchmarks/race.py run --data CIFAR --budgets 60 180 300 --seeds 0 1 2
    python benchmarks/race.py tune --data CIFAR --budgets 60
    python benchmarks/race.py table

Two tables that are never mixed. *Table A*: each library as its own example has it (transforms, heads, optimizer,
temperature), on the same images, network and batch. *Table B*: the algorithms alone, all in this package's pipeline
with the same network, order of images and views.

The clock is CPU time of training alone: loading, augmentation, step, teacher; not evaluation, and not decoding the
images once at the start. A step is charged the 30th percentile of the last hundred, because other work on the machine
makes single steps slow even in CPU time. The speed of a matrix product before and after a run is kept beside it, the
faster of which says what kind of core it was. Two runs are compared if their cores are within a quarter of each other
and if neither had a tenth more or fewer steps than the other, relative to the median of its row (within a tenth of
each other, where one of the rows has fewer than three runs and so no median to speak of). Every schedule
runs on the share of the budget that is spent, so a method that is slower per step is not cut off before its annealing.

One evaluation for all: kNN over all training images (k = 20 and 200), of both networks where there are two; a linear
probe of the exported one; and its kNN with batch-norm statistics that are measured again (*recalibrated*). `tune` tries
the three rates of each row of table B on seed 100, which never races; `run` takes the best one.

Each finished run is a small file in `benchmarks/results/race/runs` (or `OUT/runs`, with `--out OUT`); what is there is
not run again. A row that loses stays in.
"""

import argparse
import copy
import itertools
import json
import math
import platform
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import momentum2
from momentum2 import backbones
from momentum2._torchvision import torchvision
from momentum2.augment import view_specs
from momentum2.backbones import Encoder
from momentum2.config import Config, DataConfig, ViewsConfig
from momentum2.data import Dataset, Loader, open_dataset
from momentum2.data.dataset import Subset
from momentum2.data.opening import find_data
from momentum2.data.sampler import seeded_subset
from momentum2.data.views import ViewBatches
from momentum2.errors import UserError
from momentum2.evaluate.accuracy import top1_top5
from momentum2.evaluate.features import Features, extract
from momentum2.evaluate.floors import Pixels, calibrate, patch_encoder, random_encoder
from momentum2.evaluate.knn import knn_scores
from momentum2.evaluate.logistic import Standardize, probe
from momentum2.files import write_whole
from momentum2.optim import build_optimizer
from momentum2.seeds import derive
from momentum2.settings import override
from momentum2.training.build import build_method
from momentum2.training.device import keep_large_blocks
from momentum2.training.plan import resolve
from momentum2.training.step import Stepper

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "race"
#: The measures by which a row is compared with the floors, and how they are called there.
FLOORED = {"knn20": "by kNN", "linear": "by linear"}
RESOLUTION = 10_000  # steps into which schedules divide a budget
TUNING_SEED = 100
CPU = torch.device("cpu")

#: What all rows share unless they say otherwise.
SHARED: dict[str, object] = {
    "model.backbone": "resnet10",
    "model.stem": "small",
    "model.width": 0.375,
    "model.stem_init": "cosines",
    "model.projector_hidden": 512,
    "model.projector_out": 128,
    "views.recipe": "byol",
    "train.batch_size": 128,
    "train.devices": 1,
    "train.device": "cpu",
    "train.precision": "fp32",
    "optim.warmup_epochs": 0,
}
MUON: dict[str, object] = {"optim.name": "muon", "optim.weight_decay": 0.0, "optim.nesterov": True}
WARM_UP = 0.02  # share of the budget in which the learning rate rises
MUON_RATES = (0.04, 0.08, 0.16)  # per 256 images
SGD_RATES = (0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Row:
    """One contestant.

    Args:
        table: A: a library as documented. B: an algorithm in our code. floor: nothing is trained.
        words: What it is, for the table.
        settings: Of our code, beside `SHARED`.
        rates: Learning rates per 256 images that `tune` tries; the middle one counts until it has.
        rival: The row with which it is compared seed by seed, if any.
    """

    table: str
    words: str
    settings: dict[str, object] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    rival: str | None = None


_BUNDLE: dict[str, object] = {
    "method.name": "byol",
    "method.repulsion": "batch",
    "method.predictor": False,
    "method.weight_momentum": 0.5,
    "method.weight_schedule": "constant",
    "method.alpha": 0.7,
    "method.temperature": 0.1,
    **MUON,
}
_BYOL: dict[str, object] = {"method.name": "byol", "method.weight_momentum": 0.03}

_SIMCLR: dict[str, object] = {"method.name": "simclr", "method.temperature": 0.1, **MUON}

#: Without it, weights grow from step to step, and what a step of fixed size changes shrinks.
_DECAY: dict[str, object] = {"optim.weight_decay": 0.1, "optim.exclude_bias_and_norm": True}
_WIDE: dict[str, object] = {"model.width": 0.5}
#: As many views in all as two of 128 images, and so as many steps.
_FOUR_VIEWS: dict[str, object] = {"views.repeat": 2, "train.batch_size": 64}
_RATES_OF_64 = tuple(2 * rate for rate in MUON_RATES)

ROWS: dict[str, Row] = {
    "bundle": Row("B", "Momentum² teacher with repulsion, no predictor, Muon", _BUNDLE, MUON_RATES, "simclr"),
    "simclr": Row("B", "SimCLR, Muon", _SIMCLR, MUON_RATES),
    "simclr-bf16": Row("B", "`simclr` in bf16", {**_SIMCLR, "train.precision": "bf16"}, MUON_RATES, "simclr"),
    "simclr-decay": Row("B", "`simclr` with weight decay", {**_SIMCLR, **_DECAY}, MUON_RATES, "simclr"),
    "simclr-wide": Row(
        "B",
        "`simclr-decay` with 32 to 256 channels",
        {**_SIMCLR, **_DECAY, **_WIDE},
        MUON_RATES,
        "simclr-decay",
    ),
    "simclr-views": Row(
        "B",
        "`simclr-decay` with four views of 64 images",
        {**_SIMCLR, **_DECAY, **_FOUR_VIEWS},
        _RATES_OF_64,
        "simclr-decay",
    ),
    "bundle-views": Row(
        "B",
        "`bundle` with weight decay and four views of 64 images",
        {**_BUNDLE, **_DECAY, **_FOUR_VIEWS},
        _RATES_OF_64,
        "simclr-views",
    ),
    # What each change is worth to the row that has them all.
    "views-no-decay": Row(
        "B",
        "`simclr-views` without weight decay",
        {**_SIMCLR, **_FOUR_VIEWS, "optim.weight_decay": 0.0},
        _RATES_OF_64,
        "simclr-views",
    ),
    "views-sgd": Row(
        "B",
        "`simclr-views` with SGD, and the decay that is usual with it",
        {
            **_SIMCLR,
            **_FOUR_VIEWS,
            "optim.name": "sgd",
            "optim.weight_decay": 1e-4,
            "optim.nesterov": False,
        },
        tuple(2 * rate for rate in SGD_RATES),
        "simclr-views",
    ),
    "views-random-stem": Row(
        "B",
        "`simclr-views` with a random first layer",
        {**_SIMCLR, **_DECAY, **_FOUR_VIEWS, "model.stem_init": "random"},
        _RATES_OF_64,
        "simclr-views",
    ),
    "views-temperature": Row(
        "B",
        "`simclr-views` with T 0.2",
        {**_SIMCLR, **_DECAY, **_FOUR_VIEWS, "method.temperature": 0.2},
        _RATES_OF_64,
        "simclr-views",
    ),
    "views-resnet18": Row(
        "B",
        "`simclr-views` with a ResNet-18 with 16 to 128 channels",
        {**_SIMCLR, **_DECAY, **_FOUR_VIEWS, "model.backbone": "resnet18", "model.width": 0.25},
        _RATES_OF_64,
        "simclr-views",
    ),
    "simclr-hour": Row(
        "B",
        "SimCLR with four views, 32 to 256 channels and less decay, in bf16",
        {**_SIMCLR, **_DECAY, **_WIDE, **_FOUR_VIEWS, "optim.weight_decay": 0.005, "train.precision": "bf16"},
        (0.16,),
    ),
    "bundle-decay": Row("B", "`bundle` with weight decay", {**_BUNDLE, **_DECAY}, MUON_RATES, "simclr-decay"),
    "bundle-slow": Row(
        "B",
        "`bundle` with a slower teacher, m 0.2 and α 0.5",
        {**_BUNDLE, "method.weight_momentum": 0.2, "method.alpha": 0.5},
        MUON_RATES,
        "bundle",
    ),
    "byol": Row("B", "Momentum² teacher as in the paper, SGD", _BYOL, SGD_RATES, "simclr"),
    "byol-muon": Row("B", "Momentum² teacher as in the paper, Muon", {**_BYOL, **MUON}, MUON_RATES, "simclr"),
    "bundle-sgd": Row(
        "B",
        "`bundle` with SGD",
        {**_BUNDLE, "optim.name": "sgd", "optim.weight_decay": 1e-4, "optim.nesterov": False},
        SGD_RATES,
        "bundle",
    ),
    "simsiam": Row(
        "B",
        "SimSiam, SGD",
        {"method.name": "simsiam", "model.projector_out": 512, "model.predictor_hidden": 128},
        SGD_RATES,
        "simclr",
    ),
    "moco": Row(
        "B",
        "MoCo with Momentum BN keys, SGD",
        {
            "method.name": "moco",
            "method.queue_size": 4096,
            "method.weight_momentum": 0.01,
            "method.weight_schedule": "constant",
            "method.alpha": 0.064,
            "method.export": "student",
        },
        SGD_RATES,
        "simclr",
    ),
    "dino": Row(
        "B",
        "DINO, two views, SGD",
        {
            "method.name": "dino",
            "method.student_norm": "synced",
            "method.teacher_norm": "synced",
            "method.weight_momentum": 0.004,
            "method.temperature": 0.1,
            "model.projector_out": 4096,
            "optim.clip_norm": 3.0,
        },
        SGD_RATES,
        "simclr",
    ),
    "solo-byol": Row(
        "B",
        "BYOL with solo-learn's settings for CIFAR-10, LARS without its clipping",
        {
            "method.name": "byol",
            "method.student_norm": "synced",
            "method.teacher_norm": "synced",
            "method.weight_momentum": 0.01,
            "method.export": "student",
            "model.projector_hidden": 4096,
            "model.projector_out": 256,
            "optim.name": "lars",
            "optim.weight_decay": 1e-5,
            "optim.lars_eta": 0.02,
            "optim.exclude_bias_and_norm": True,
        },
        (0.5, 1.0, 2.0),
        "simclr",
    ),
    "solo-simclr": Row(
        "B",
        "SimCLR with solo-learn's settings for CIFAR-10, LARS without its clipping",
        {
            "method.name": "simclr",
            "method.temperature": 0.2,
            "model.projector_hidden": 2048,
            "model.projector_out": 256,
            "views.recipe": "simclr",
            "optim.name": "lars",
            "optim.weight_decay": 1e-4,
            "optim.lars_eta": 0.02,
            "optim.exclude_bias_and_norm": True,
        },
        (0.2, 0.4, 0.8),
        "simclr",
    ),
    "lightly-byol": Row("A", "lightly's BYOL example"),
    "lightly-simclr": Row("A", "lightly's SimCLR example"),
    "lightly-simsiam": Row("A", "lightly's SimSiam example"),
    "lightly-fastsiam": Row("A", "lightly's FastSiam example, four views"),
    "pixels": Row("floor", "raw pixels"),
    "pca": Row("floor", "raw pixels, PCA-whitened to 256 dimensions"),
    "random": Row("floor", "the untrained network"),
    "patches": Row("floor", "whitened patches"),
}


#: The rows that decide between the teacher and SimCLR, and what they have.
TEACHERS = {
    "bundle": "repulsion",
    "bundle-decay": "repulsion and weight decay",
    "bundle-views": "repulsion, weight decay and four views",
}


@dataclass(frozen=True)
class Images:
    """Labeled images, opened."""

    config: DataConfig
    train: Dataset
    test: Dataset
    classes: int


def open_images(data: str, cache: str | None, train_size: int | None, test_size: int | None) -> Images:
    config = replace(find_data(data, DataConfig(image_size=32)), cache_dir=cache, train_size=train_size)
    train, test = open_dataset(config), open_dataset(replace(config, train_size=None), config.test_split)
    if test_size is not None:
        test = Subset(test, seeded_subset(len(test), 0, min(test_size, len(test))))
    assert train.labels is not None
    return Images(config, train, test, 1 + int(train.labels.max()))


class Clock:
    """CPU seconds of training, with each step charged what it costs when the machine is left alone."""

    def __init__(self, budget: float) -> None:
        self.budget, self.spent, self.steps, self.raw = budget, 0.0, 0, 0.0
        self.recent: deque[float] = deque(maxlen=100)
        self.last = time.process_time()

    @property
    def share(self) -> float:
        """Of the budget, what is spent."""
        return min(self.spent / self.budget, 1.0)

    def tick(self) -> bool:
        """Charge the step that ends now; whether there is time for another."""
        now = time.process_time()
        self.recent.append(now - self.last)
        self.raw, self.last = self.raw + now - self.last, now
        self.steps += 1
        self.spent += float(np.quantile(self.recent, 0.3))
        return self.spent < self.budget


def gemm() -> float:
    """GFLOP/s of a 1024³ product, the best of several: what this core can do now."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    seconds = []
    for _ in range(12):
        start = time.process_time()
        a @ b
        seconds.append(time.process_time() - start)
    return 2 * 1024**3 / min(seconds) / 1e9


@dataclass(frozen=True)
class Trained:
    """What a row ends with: its encoders (the one to export first), and what it took."""

    encoders: dict[str, Encoder]
    clock: Clock
    settings: dict[str, Any]
    views: int
    batch: int


def train_ours(row: Row, rate: float, images: Images, budget: float, seed: int) -> Trained:
    """A row of table B: this package's loader, views, method and step; only the schedules follow the budget."""
    given = {**SHARED, **row.settings, "optim.lr": rate, "train.seed": seed, "train.steps": RESOLUTION}
    config = replace(override(Config(), given), data=replace(images.config, image_size=32))
    plan = resolve(config, len(images.train), 1)
    warm_up = replace(plan.schedule, warmup=round(WARM_UP * RESOLUTION))
    plan = replace(plan, schedule=warm_up)
    method = build_method(config, plan, images.classes).to(memory_format=torch.channels_last).train()
    optimizer = build_optimizer(
        method.named_parameters(), config.optim, plan.schedule.lr_base, method.constant_lr
    )
    take_step = Stepper(method, optimizer, config.train, config.optim, CPU)
    specs = view_specs(config.views, config.data.image_size)
    endless = 10**7
    loader = Loader(
        images.train, specs, seed=seed, batch_size=config.train.batch_size, start=0, stop=endless, device=CPU
    )
    clock = Clock(budget)
    with ViewBatches(loader, specs) as batches:
        for batch in batches:
            k = min(int(clock.share * RESOLUTION), RESOLUTION - 1)
            taken = take_step(k, plan.schedule.lr(k), lambda i, batch=batch: batch.inputs(i, 1))
            if not math.isfinite(float(taken.loss)):
                raise SystemExit(f"The loss is {float(taken.loss)} after {clock.steps} steps.")
            if not clock.tick():
                break
    encoders = {str(name): encoder for name, encoder in method.encoders().items()}
    settings = asdict(config)
    for section in ("data", "eval_data"):  # where the images are is nobody's business
        settings[section] |= {"root": None, "cache_dir": None}
    return Trained(encoders, clock, settings, len(specs), config.train.batch_size)


def train_lightly(name: str, images: Images, budget: float, seed: int) -> Trained:
    """A row of table A: lightly's own transforms, heads, losses and optimizer, wired as its examples do."""
    from lightly.loss import NegativeCosineSimilarity, NTXentLoss
    from lightly.models.modules import (
        BYOLPredictionHead,
        BYOLProjectionHead,
        SimCLRProjectionHead,
        SimSiamPredictionHead,
        SimSiamProjectionHead,
    )
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from lightly.transforms import FastSiamTransform, SimCLRTransform, SimSiamTransform
    from lightly.transforms.byol_transform import BYOLTransform, BYOLView1Transform, BYOLView2Transform
    from lightly.utils.scheduler import cosine_schedule

    torch.manual_seed(derive(seed, "race"))
    np.random.seed(derive(seed, "race") % 2**32)  # noqa: NPY002 (some of its transforms draw from it)
    backbone = backbones.of_config(override(Config(), SHARED).model)
    d = backbone.feature_dim
    heads = nn.ModuleDict()
    encoders: dict[str, Encoder] = {"student": backbone}
    cosine = NegativeCosineSimilarity()
    clock = Clock(budget)
    if name == "lightly-byol":
        transform = BYOLTransform(
            view_1_transform=BYOLView1Transform(input_size=32, gaussian_blur=0.0),
            view_2_transform=BYOLView2Transform(input_size=32, gaussian_blur=0.0),
        )
        heads["g"], heads["q"] = BYOLProjectionHead(d, 1024, 256), BYOLPredictionHead(256, 1024, 256)
        teacher, teacher_g = copy.deepcopy(backbone), copy.deepcopy(heads["g"])
        deactivate_requires_grad(teacher)
        deactivate_requires_grad(teacher_g)
        encoders["teacher"] = teacher

        def loss_of(views: Sequence[Tensor]) -> Tensor:
            m = cosine_schedule(int(clock.share * RESOLUTION), RESOLUTION, 0.996, 1)
            update_momentum(backbone, teacher, m=m)
            update_momentum(heads["g"], teacher_g, m=m)
            p = [heads["q"](heads["g"](backbone(v))) for v in views]
            with torch.no_grad():
                z = [teacher_g(teacher(v)) for v in views]
            return 0.5 * (cosine(p[0], z[1]) + cosine(p[1], z[0]))

    elif name == "lightly-simclr":
        transform = SimCLRTransform(input_size=32, gaussian_blur=0.0)
        heads["g"], contrast = SimCLRProjectionHead(d, 512, 128), NTXentLoss()

        def loss_of(views: Sequence[Tensor]) -> Tensor:
            return contrast(*(heads["g"](backbone(v)) for v in views))

    else:
        several = name == "lightly-fastsiam"
        transform = FastSiamTransform(input_size=32) if several else SimSiamTransform(input_size=32)
        heads["g"], heads["q"] = SimSiamProjectionHead(d, 512, 128), SimSiamPredictionHead(128, 64, 128)

        def loss_of(views: Sequence[Tensor]) -> Tensor:
            z = [heads["g"](backbone(v)) for v in views]
            p = [heads["q"](x) for x in z]
            z = [x.detach() for x in z]
            total = torch.zeros(())
            for i, x in enumerate(p):
                others = torch.stack([y for j, y in enumerate(z) if j != i]).mean(0)
                total = total + cosine(x, others) / len(p)
            return total

    pictures = _pictures(images.train)
    clock.last = time.process_time()  # decoding once is not training
    batch_size = int(str(SHARED["train.batch_size"]))
    loader = torch.utils.data.DataLoader(
        [*range(len(pictures))],  # type: ignore[arg-type]
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda chosen: [
            torch.stack(views) for views in zip(*(transform(pictures[i]) for i in chosen), strict=True)
        ],
    )
    optimizer = torch.optim.SGD([*backbone.parameters(), *heads.parameters()], lr=0.06)
    backbone.train(), heads.train()

    def epochs() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    count = 0
    for views in epochs():
        count = len(views)
        loss = loss_of(views)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not clock.tick():
            break
    settings = {
        "library": f"lightly {_version('lightly')}",
        # Without the places in memory that some of its parts print.
        "transform": re.sub(
            r" object at 0x\w+", "", "; ".join(repr(t.transform) for t in transform.transforms)
        ),
        "optimizer": "SGD, lr 0.06, no momentum, no schedule",
        "batch_size": batch_size,
        "backbone": {k: v for k, v in SHARED.items() if k.startswith("model.")},
        "heads": repr(heads),
    }
    return Trained(encoders, clock, settings, count, batch_size)


def _pictures(dataset: Dataset) -> list[Any]:
    """All images as PIL images in memory, as lightly's CIFAR-10 example has them."""
    from PIL import Image

    found = []
    for start in range(0, len(dataset), 1000):
        pixels = dataset.read(range(start, min(start + 1000, len(dataset))))
        found += [Image.fromarray(np.ascontiguousarray(image)) for image in pixels]
    return found


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def evaluate(encoder: Encoder, images: Images, linear: bool, seed: int) -> dict[str, float]:
    """kNN over all training images, and a linear probe, of center views."""
    (spec,) = view_specs(ViewsConfig("evaluation"), 32)
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bank, test = extract(encoder, images.train, spec), extract(encoder, images.test, spec)
    return _score(bank, test, images.classes, linear, seed)


def recalibrated(encoder: Encoder, images: Images, seed: int) -> float:
    """kNN of a network whose statistics are measured again, without augmentation; it keeps them."""
    (spec,) = view_specs(ViewsConfig("evaluation"), 32)
    calibrate(encoder, images.train, spec, seed, CPU, 0)
    return evaluate(encoder, images, False, seed)["knn20"]


def _score(bank: Features, test: Features, classes: int, linear: bool, seed: int) -> dict[str, float]:
    assert bank.labels is not None
    assert test.labels is not None
    found = {"dimensions": float(bank.features.shape[1])}
    for k in (20, 200):
        k = min(k, len(bank.features))
        votes = knn_scores(bank.features, bank.labels, test.features, classes, k)
        found[f"knn{k}"] = top1_top5(votes, test.labels)[0]
    if linear:
        scores = probe(bank.features, bank.labels, test.features, classes, seed)
        found["linear"] = top1_top5(scores, test.labels)[0]
    return found


class PcaPixels(Pixels):
    """Raw pixels in the directions of their largest variances, each scaled to variance 1."""

    def __init__(self, size: int, pixels: Tensor, count: int = 256) -> None:
        super().__init__(size)
        self.scale = Standardize(pixels)
        self.scale.std = torch.ones_like(self.scale.std)
        centered = self.scale(pixels)
        values, vectors = torch.linalg.eigh((centered.T @ centered).double() / len(centered))
        count = min(count, len(centered) - 1, len(values))
        self.project = (vectors[:, -count:] / (values[-count:] + 1e-2).sqrt()).float()
        self.feature_dim = count

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x)) @ self.project


def floor(name: str, images: Images, seed: int) -> Encoder:
    """A floor's encoder."""
    (spec,) = view_specs(ViewsConfig("evaluation"), 32)
    if name == "pixels":
        return Pixels(32)
    if name == "pca":
        some = Subset(images.train, seeded_subset(len(images.train), seed, min(20_000, len(images.train))))
        return PcaPixels(32, extract(Pixels(32), some, spec).features)
    if name == "patches":
        return patch_encoder(images.train, spec, seed, CPU, 0)
    return random_encoder(override(Config(), SHARED).model, images.train, spec, seed, CPU, 0)


def one(
    name: str, rate: float | None, budget: float, seed: int, images: Images, linear: str
) -> dict[str, Any]:
    """Train and evaluate one row; everything that is known about it."""
    row, before = ROWS[name], gemm()
    found: dict[str, Any] = {
        "row": name,
        "table": row.table,
        "words": row.words,
        "seed": seed,
        "budget": budget,
        "date": f"{date.today()}",
        "data": {"name": images.config.name, "train": len(images.train), "test": len(images.test)},
        "versions": {
            "momentum2": momentum2.__version__,
            "torch": torch.__version__,
            "torchvision": torchvision.__version__,
            "python": platform.python_version(),
        },
        "machine": {"processor": _processor(), "threads": torch.get_num_threads()},
    }
    if row.table == "floor":
        start = time.process_time()
        networks = {name: floor(name, images, seed)}
        found |= {"settings": {}, "fit_seconds": time.process_time() - start}
    else:
        if row.table == "A":
            trained = train_lightly(name, images, budget, seed)
        else:
            assert rate is not None
            trained = train_ours(row, rate, images, budget, seed)
            found["rate"] = rate
        clock, networks = trained.clock, trained.encoders
        found |= {
            "settings": trained.settings,
            "steps": clock.steps,
            "images": clock.steps * trained.batch,
            "views": trained.views,
            "cpu_seconds": clock.spent,
            "raw_cpu_seconds": clock.raw,
            "step_seconds": median(clock.recent),
            "mmacs": _macs(next(iter(networks.values()))) / 1e6,
        }
    found["gemm"] = [before, gemm()]
    start = time.process_time()
    found["networks"] = {
        network: evaluate(encoder, images, linear == "all" or (linear == "exported" and i == 0), seed)
        for i, (network, encoder) in enumerate(networks.items())
    }
    if row.table != "floor":
        first(found)["recalibrated"] = recalibrated(next(iter(networks.values())), images, seed)
    found["evaluation_seconds"] = time.process_time() - start
    found["peak_gb"] = _peak_gb()
    return found


def _macs(encoder: nn.Module) -> int:
    """Multiplications of one image's forward, in convolutions and matrix products."""
    total = 0

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        nonlocal total
        weight = module.weight
        total += weight.numel() * (output.shape[2] * output.shape[3] if output.ndim == 4 else 1)

    hooks = [
        m.register_forward_hook(count) for m in encoder.modules() if isinstance(m, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        encoder.eval()(torch.zeros(1, 3, 32, 32))
    for hook in hooks:
        hook.remove()
    return total


def _processor() -> str:
    try:
        return re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    except (OSError, IndexError):
        return platform.processor()


def _peak_gb() -> float:
    try:
        # Not ru_maxrss, in which a process begins with the peak of the one that started it.
        return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1e6
    except (OSError, IndexError):
        return math.nan


def place(out: Path, name: str, rate: float | None, budget: float, seed: int) -> Path:
    """Where the result of a run is kept."""
    at = f"-rate-{rate:g}" if seed == TUNING_SEED and rate is not None else ""
    budget_words = "" if ROWS[name].table == "floor" else f"-{budget:g}s"
    return out / "runs" / f"{name}{budget_words}{at}-seed-{seed}.json"


def chosen_rate(out: Path, name: str) -> float | None:
    """A row's best rate on the tuning seed at the longest budget that has all of them, else the middle one."""
    rates = ROWS[name].rates
    if not rates:
        return None
    tried: dict[float, dict[float, float]] = {}
    for r in read_runs(out):
        if r["row"] == name and r["seed"] == TUNING_SEED:
            tried.setdefault(r["budget"], {})[r["rate"]] = first(r)["knn20"]
    complete = [budget for budget, found in tried.items() if set(rates) <= set(found)]
    if not complete:
        return sorted(rates)[len(rates) // 2]
    found = tried[max(complete)]
    return max(rates, key=lambda rate: found[rate])


def read_runs(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*.json"))]


def first(run: dict[str, Any]) -> dict[str, float]:
    """The numbers of the network that a run exports."""
    return next(iter(run["networks"].values()))  # type: ignore[no-any-return]


def pending(
    out: Path, rows: Sequence[str], budgets: Sequence[float], seeds: Sequence[int], tune: bool
) -> Iterator[tuple[str, float | None, float, int]]:
    """The runs that are not there yet, in turns: all rows of one seed before the next seed."""
    for budget in budgets:
        for seed in [TUNING_SEED] if tune else seeds:
            for name in rows:
                row = ROWS[name]
                if tune and not row.rates:
                    continue
                for rate in row.rates if tune else [chosen_rate(out, name)]:
                    if not place(out, name, rate, budget, seed).exists():
                        yield name, rate, budget, seed


def run(options: argparse.Namespace) -> bool:
    """Each run in a process of its own, which `--launcher` may start; whether all of them ended well."""
    out, tune, well = Path(options.out), options.command == "tune", True
    (out / "runs").mkdir(parents=True, exist_ok=True)
    for name, rate, budget, seed in pending(out, options.rows, options.budgets, options.seeds, tune):
        path = place(out, name, rate, budget, seed)
        if path.exists():  # a floor has no budget
            continue
        words = [*options.launcher, sys.executable, __file__, "one", "--data", options.data, "--rows", name]
        words += [
            "--budgets",
            f"{budget:g}",
            "--seeds",
            f"{seed}",
            "--result",
            str(path),
            "--linear",
            options.linear,
        ]
        words += ["--rate", f"{rate:g}"] if rate is not None else []
        for option, value in (
            ("--cache", options.cache),
            ("--train-size", options.train_size),
            ("--test-size", options.test_size),
        ):
            words += [option, f"{value}"] if value is not None else []
        print(path.stem, end=": ", flush=True)
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode or not path.exists():
            print(f"failed\n{ended.stderr[-2000:]}", flush=True)
            well = False
            continue
        done = json.loads(path.read_text())
        print(", ".join(f"{n} {v['knn20']:.2f}" for n, v in done["networks"].items()), flush=True)
    return well


def run_one(options: argparse.Namespace) -> None:
    images = open_images(options.data, options.cache, options.train_size, options.test_size)
    (name,), (budget,), (seed,) = options.rows, options.budgets, options.seeds
    rate = options.rate if options.rate is not None else chosen_rate(Path(options.out), name)
    found = one(name, rate, budget, seed, images, options.linear)
    write_whole(Path(options.result), (json.dumps(found, indent=1) + "\n").encode())


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95% interval of a mean by Student's t; None of fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def comparable(a: dict[str, Any], b: dict[str, Any], usual: Sequence[float]) -> bool:
    """Whether the machine was as fast for both, whose rows usually have so many steps; none where that is not known."""
    cores = max(a["gemm"]), max(b["gemm"])
    if not usual:
        return max(cores) / min(cores) <= 1.1
    paces = a["steps"] / usual[0], b["steps"] / usual[1]
    return max(cores) / min(cores) <= 1.25 and max(paces) / min(paces) <= 1.1


def time_to(target: float, curve: Sequence[tuple[float, float]]) -> str:
    """CPU seconds at which annealed runs reach `target`, between budgets on a logarithmic scale of time."""
    before: tuple[float, float] | None = None
    for budget, accuracy in sorted(curve):
        if accuracy >= target:
            if before is None:
                return f"≤ {budget:g}"
            share = (target - before[1]) / (accuracy - before[1])
            return f"{before[0] * (budget / before[0]) ** share:.0f}"
        before = (budget, accuracy)
    return f"> {before[0]:g}" if before else "–"


def at_least(short: str, long: str) -> float | None:
    """How many times `short` fits into `long`, both as `time_to` writes them, at least; None if they do not say."""
    if "≤" in long or ">" in short or "–" in (short, long):
        return None
    return float(long.removeprefix("> ")) / float(short.removeprefix("≤ "))


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means, intervals, paired differences to rivals and times to an accuracy, of racing seeds alone."""
    racing = [r for r in runs if r["seed"] != TUNING_SEED]
    by: dict[str, dict[float, dict[int, dict[str, Any]]]] = {}
    for r in racing:
        by.setdefault(r["row"], {}).setdefault(r["budget"], {})[r["seed"]] = r
    floors: dict[str, dict[str, float]] = {}
    for name in (name for name, row in ROWS.items() if row.table == "floor" and name in by):
        own = [first(r) for budgets in by[name].values() for r in budgets.values()]
        floors[name] = {what: mean(r[what] for r in own) for what in FLOORED if all(what in r for r in own)}
    rows: dict[str, Any] = {}
    for name, budgets in by.items():
        entry: dict[str, Any] = {"table": ROWS[name].table, "words": ROWS[name].words, "budgets": {}}
        for budget, found in sorted(budgets.items()):
            numbers = {
                what: [first(r)[what] for r in found.values() if what in first(r)]
                for what in ("knn20", "knn200", "linear", "recalibrated")
            }
            cell: dict[str, Any] = {
                "seeds": sorted(found),
                "dimensions": first(next(iter(found.values())))["dimensions"],
            }
            for what, values in numbers.items():
                if values:
                    cell[what] = {"mean": mean(values), "interval": interval(values)}
            rival = ROWS[name].rival
            others = by.get(rival, {}).get(budget, {}) if rival else {}
            if others:
                both = [s for s in found if s in others]
                enough = min(len(found), len(others)) > 2
                usual = [median(r["steps"] for r in own.values()) for own in (found, others) if enough]
                equal = [s for s in both if comparable(found[s], others[s], usual)]
                gaps = [first(found[s])["knn20"] - first(others[s])["knn20"] for s in equal]
                if both:
                    cell["to_rival"] = {
                        "rival": rival,
                        "pairs": len(gaps),
                        "refused": len(both) - len(gaps),
                        "mean": mean(gaps) if gaps else None,
                        "interval": interval(gaps),
                    }
            if "steps" in next(iter(found.values())):
                cell["steps"] = mean(r["steps"] for r in found.values())
            cell["gemm"] = mean(mean(r["gemm"]) for r in found.values())
            cell["other"] = {
                network: mean(
                    r["networks"][network]["knn20"] for r in found.values() if network in r["networks"]
                )
                for network in [*next(iter(found.values()))["networks"]][1:]
            }
            cell["below"] = [
                f"{ROWS[f].words} {how}"
                for what, how in FLOORED.items()
                if what in cell and entry["table"] != "floor"
                for f in floors
                if floors[f].get(what, 0) > cell[what]["mean"]
            ]
            entry["budgets"][f"{budget:g}"] = cell
        curve = [(float(b), c["knn20"]["mean"]) for b, c in entry["budgets"].items()]
        if entry["table"] != "floor":
            entry["time_to"] = {f"{target}": time_to(target, curve) for target in (40, 45, 50)}
        rows[name] = entry
    return {"floors": floors, "rows": rows}


def table(options: argparse.Namespace) -> None:
    """The page, the plot and one JSON of everything."""
    out = Path(options.out)
    runs = read_runs(out)
    if not runs:
        raise SystemExit(f"There are no runs in {out}. Start some with race.py run.")
    found = summarize(runs)
    write_whole(out / "race.json", (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    page = Path(options.page)
    page.parent.mkdir(parents=True, exist_ok=True)
    picture = page.with_suffix(".svg")
    plot(found, picture)
    write_whole(page, markdown(found, runs, picture.name).encode())
    print(f"{page}, {picture}, {out / 'race.json'}")


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    within = cell["interval"]
    return f"{cell['mean']:.1f}" + (f" ± {within:.1f}" if within is not None else "")


def pairs(found: dict[str, Any]) -> Iterator[str]:
    """What each row is above the row that it is compared with, seed by seed: what its change is worth."""
    yield "## Row against row"
    yield ""
    yield (
        "kNN of a row minus that of another with the same seed on an equally fast core, with the 95% interval of the "
        "mean. The rows of a pair differ in what their names in table B say."
    )
    yield ""
    yield "| row | minus | seconds | pairs | difference | not compared |"
    yield "|---|---|---|---|---|---|"
    for name, entry in found["rows"].items():
        for budget, cell in entry["budgets"].items():
            if gap := cell.get("to_rival"):
                within = f" ± {gap['interval']:.1f}" if gap["interval"] is not None else ""
                value = f"{gap['mean']:+.1f}{within}" if gap["pairs"] else "–"
                refused = f"{gap['refused']}: the machine's speed differed" if gap["refused"] else "–"
                yield f"| `{name}` | `{gap['rival']}` | {budget} | {gap['pairs']} | {value} | {refused} |"


def tuning(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What `tune` found."""
    yield "## Learning rates"
    yield ""
    tried: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for r in runs:
        if r["seed"] == TUNING_SEED:
            tried.setdefault((r["row"], r["budget"]), []).append(r)
    if not tried:
        yield "`tune` was not run: every row of table B has the middle one of its rates, or its only one."
        return
    yield (
        f"kNN by learning rate per 256 images on seed {TUNING_SEED}, which does not race. Rows that raced "
        "after this have the best rate of the longest budget that has all of them; all other rows have the middle one."
    )
    yield ""
    yield "| row | seconds | rate: kNN |"
    yield "|---|---|---|"
    for (name, budget), found in sorted(tried.items()):
        by_rate = sorted((r["rate"], first(r)["knn20"]) for r in found)
        best = max(value for _, value in by_rate)
        cells = (f"{'**' * (v == best)}{rate:g}: {v:.1f}{'**' * (v == best)}" for rate, v in by_rate)
        yield f"| `{name}` | {budget:g} | {', '.join(cells)} |"


def markdown(found: dict[str, Any], runs: Sequence[dict[str, Any]], picture: str) -> str:
    """The page of the race, generated from the runs alone."""
    data, when = runs[0]["data"], sorted({r["date"] for r in runs})
    speeds = [mean(r["gemm"]) for r in runs]
    machine = runs[0]["machine"]
    lines = [
        "# A race in CPU seconds",
        "",
        "<!-- Written by `python benchmarks/race.py table`; do not edit. -->",
        "",
        f"{data['train']:,} training and {data['test']:,} test images ({data['name']}), "
        f"{when[0] if len(when) == 1 else f'{when[0]} to {when[-1]}'}, one thread of {machine['processor']} "
        f"({min(speeds):.0f} to {max(speeds):.0f} GFLOP/s in a 1024³ product), "
        f"torch {runs[0]['versions']['torch']}.",
        "",
        "Numbers are kNN top-1 (k = 20) over all training images, in percent: the mean over seeds and the 95% interval "
        "of that mean by Student's t (without one, it is one seed). Budgets are CPU seconds of training; every "
        "schedule runs on the share of the budget that is spent. The cores differed, in steps per second up to twofold "
        "even where their matrix products are about equally fast. So two rows of a column, or a row's seeds of "
        "different days, may differ by the core alone: look at the steps as well, or at the paired differences, "
        "for which only runs on equal cores count. How the clock works, what is counted and how a row is tuned are "
        "described at the top of [`benchmarks/race.py`](../benchmarks/race.py). *To 40 %* is the budget after which "
        "runs reach 40%, interpolated between budgets on a logarithmic scale; ≤ means that the shortest budget was "
        "enough. Losing rows are kept.",
        "",
        f"![kNN accuracy against CPU seconds]({picture})",
        "",
        "## Floors",
        "",
        "Nothing is trained by gradient here. The tables name the floors that a row is below.",
        "",
        "| floor | kNN, k = 20 | k = 200 | linear | dimensions | CPU seconds to make and evaluate |",
        "|---|---|---|---|---|---|",
    ]
    for name in found["floors"]:
        entry = found["rows"][name]
        (cell, *_) = entry["budgets"].values()
        own = [r for r in runs if r["row"] == name]
        cost = mean(r["fit_seconds"] + r["evaluation_seconds"] for r in own)
        lines.append(
            f"| {entry['words']} | {_cell(cell['knn20'])} | {_cell(cell.get('knn200'))} | {_cell(cell.get('linear'))} "
            f"| {cell['dimensions']:.0f} | {cost:.0f} |"
        )
    titles = {
        "A": "Table A: libraries as documented",
        "B": "Table B: algorithms alone, in one pipeline",
    }
    for key, title in titles.items():
        rows = {n: e for n, e in found["rows"].items() if e["table"] == key}
        if not rows:
            continue
        budgets = sorted({float(b) for e in rows.values() for b in e["budgets"]})
        columns = [f"{b:g} s" for b in budgets]
        lines += ["", f"## {title}", "", f"| row | {' | '.join(columns)} | to 40 % | to 45 % | to 50 % |"]
        lines.append("|---|" + "---|" * (len(columns) + 3))
        longest = {n: max(map(float, e["budgets"])) for n, e in rows.items()}
        order = sorted(
            rows, key=lambda n: (-longest[n], -rows[n]["budgets"][f"{longest[n]:g}"]["knn20"]["mean"])
        )
        for name in order:
            entry = rows[name]
            cells = [_cell(entry["budgets"].get(f"{b:g}", {}).get("knn20")) for b in budgets]
            times = [f"{entry['time_to'][t]} s" for t in ("40", "45", "50")]
            lines.append(f"| {entry['words']} (`{name}`) | {' | '.join([*cells, *times])} |")
        lines += ["", "At its longest budget:", ""]
        head = (
            "row",
            "seconds",
            "seeds",
            "GFLOP/s",
            "steps",
            "kNN, k = 200",
            "recalibrated",
            "linear",
            "other network",
            "below",
        )
        lines.append(f"| {' | '.join(head)} |")
        lines.append("|---" * len(head) + "|")
        for name in order:
            cell = rows[name]["budgets"][f"{longest[name]:g}"]
            other = ", ".join(f"{n} {v:.1f}" for n, v in cell["other"].items()) or "–"
            cells = [
                f"`{name}`",
                f"{longest[name]:g}",
                f"{len(cell['seeds'])}",
                f"{cell['gemm']:.0f}",
                f"{cell.get('steps', math.nan):.0f}",
                *(_cell(cell.get(what)) for what in ("knn200", "recalibrated", "linear")),
                other,
                ", ".join(cell["below"]) or "–",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        *pairs(found),
        "",
        *tuning(runs),
        "",
        *verdicts(found),
        "",
        "## Commands",
        "",
        "```text",
        *commands(found),
        "```",
        "",
    ]
    return "\n".join(lines)


def commands(found: dict[str, Any]) -> Iterator[str]:
    """What runs all of this, a line for rows with the same budget and seeds."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, entry in found["rows"].items():
        for budget, cell in entry["budgets"].items():
            of = "" if entry["table"] == "floor" else f" --budgets {budget}"
            alike.setdefault((of, tuple(cell["seeds"])), []).append(name)
    for (of, seeds), rows in sorted(alike.items(), key=lambda item: (len(item[0][0]), item[0])):
        which = f"--rows {' '.join(rows)} --seeds {' '.join(map(str, seeds))}"
        yield f"python benchmarks/race.py run --data CIFAR{of} {which}"


def verdicts(found: dict[str, Any]) -> Iterator[str]:
    """What the race says, in sentences that its own numbers decide."""
    rows = found["rows"]
    yield "## What it says"
    yield ""
    for name, teacher in TEACHERS.items():
        for budget, cell in rows.get(name, {}).get("budgets", {}).items():
            gap = cell.get("to_rival")
            if gap and gap["interval"] is not None:
                low, high = gap["mean"] - gap["interval"], gap["mean"] + gap["interval"]
                word = "ahead of" if low > 0 else "behind" if high < 0 else "not distinguishable from"
                yield (
                    f"- After {budget} s the Momentum² teacher with {teacher} is {word} SimCLR with the same settings: "
                    f"{gap['mean']:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}, {gap['pairs']} pairs."
                )
    for ours in (name for name in ("bundle", "simclr") if name in rows):
        for target, here in rows[ours]["time_to"].items():
            longer = {
                name: times
                for name, entry in rows.items()
                if entry["table"] == "A" and (times := at_least(here, entry["time_to"][target]))
            }
            if longer:
                names, times = ", ".join(f"`{name}`" for name in longer), min(longer.values())
                yield f"- To {target}% `{ours}` takes {here} s; {names} take about {times:.0f} times as long or more."
    for name, entry in rows.items():
        if entry["table"] != "floor":
            budget, cell = max(entry["budgets"].items(), key=lambda item: float(item[0]))
            if cell["below"]:
                yield f"- `{name}` after {budget} s is below {', '.join(cell['below'])}."


def plot(found: dict[str, Any], path: Path) -> None:
    """Accuracy against budget, one line a row, floors dashed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "race"  # the same picture of the same numbers
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 5))
    budgets: set[float] = set()
    racing = [(name, entry) for name, entry in found["rows"].items() if entry["table"] != "floor"]
    for color, (name, entry) in zip(itertools.cycle(pyplot.get_cmap("tab20").colors), racing, strict=False):
        points = sorted((float(b), c["knn20"]) for b, c in entry["budgets"].items())
        x, y = [b for b, _ in points], [c["mean"] for _, c in points]
        error = [c["interval"] or 0 for _, c in points]
        marker = "s" if entry["table"] == "A" else "o"
        axis.errorbar(x, y, error, marker=marker, markersize=4, color=color, capsize=2, label=name)
        budgets.update(x)
    for name, value in ((name, floor["knn20"]) for name, floor in found["floors"].items()):
        axis.axhline(value, color="gray", linewidth=0.8, linestyle=":")
        axis.annotate(
            f"{ROWS[name].words} {value:.1f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            ha="right",
            va="bottom",
            color="gray",
        )
    axis.set_xscale("log")
    axis.set_xticks(sorted(budgets), [f"{b:g}" for b in sorted(budgets)])
    axis.minorticks_off()
    axis.set_xlabel("CPU seconds of training")
    axis.set_ylabel("kNN top-1, %")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["run", "tune", "one", "table"])
    parser.add_argument("--data", help="labeled images: a folder with train and test, or shapes")
    parser.add_argument("--out", default=str(RESULTS), help="where results are kept")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[60.0, 180.0, 300.0], help="CPU seconds")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--linear", choices=["all", "exported", "none"], default="exported")
    parser.add_argument("--cache", help="folder of packed images (default: the user's cache folder)")
    parser.add_argument(
        "--launcher", nargs="+", default=[], help="words before each run, such as taskset -c 0"
    )
    parser.add_argument("--page", default=str(ROOT / "docs" / "race.md"))
    parser.add_argument("--train-size", type=int, help="use only so many training images")
    parser.add_argument("--test-size", type=int)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.command == "table":
        table(options)
        return
    if options.data is None:
        parser.error("--data is missing")
    try:
        find_data(options.data, DataConfig())
        if options.command == "one":
            torch.set_num_threads(1)
            keep_large_blocks()
            run_one(options)
        elif not run(options):
            sys.exit(1)
    except UserError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
