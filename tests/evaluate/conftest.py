from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from momentum2.api import pretrain
from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    TrainConfig,
)
from momentum2.data.shapes import CLASS_NAMES, render
from momentum2.data.shapes import labels as class_labels
from momentum2.evaluate import linear, semi
from momentum2.evaluate.subject import Subject


class TinyEncoder(nn.Module):
    """Two convolutions with batch norm: quick, but as dependent on mode and statistics as a large one."""

    feature_dim = 12

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3),
            nn.BatchNorm2d(12),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


@pytest.fixture
def encoder() -> TinyEncoder:
    torch.manual_seed(0)
    return TinyEncoder()


SHAPES = DataConfig("shapes", image_size=16, train_size=300, cache="off")


@pytest.fixture
def shapes() -> DataConfig:
    """A few hundred of the drawn images, and no cache on disk."""
    return SHAPES


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some drawn images as files: 184 in train, 61 in test, of 10 classes."""
    root = tmp_path_factory.mktemp("data") / "pictures"
    for split, count in (("train", 184), ("test", 61)):
        images, labels = (
            render(np.arange(count), 16, split=split),
            class_labels(np.arange(count), split=split),
        )
        for i, (pixels, label) in enumerate(zip(images, labels, strict=True)):
            folder = root / split / CLASS_NAMES[label].replace(" ", "-")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """A real run of six steps, with checkpoints after the third and the last; not to be written to."""
    out = tmp_path_factory.mktemp("run") / "tiny"
    config = Config(
        method=MethodConfig("byol"),
        model=ModelConfig("resnet18", "small", 0.125, projector_hidden=32, projector_out=16),
        data=SHAPES,
        eval_data=DataConfig("folder", str(pictures), image_size=16, cache_dir=str(out.parent / "cache")),
        train=TrainConfig(steps=6, batch_size=16, checkpoint_every=3, precision="fp32", threads=1),
        optim=OptimConfig(lr=0.2),
        monitor=MonitorConfig(report=False, knn_every=1),
    )
    assert pretrain(config, out).finished
    return out


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of that run which a test may write to."""
    copy = tmp_path / "tiny"
    for path in finished_run.rglob("*"):
        if path.is_file() and path.name != ".lock":
            target = copy / path.relative_to(finished_run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return copy


class Planned(Exception):
    """The config with which a classifier would be trained, raised in place of its training."""


@pytest.fixture
def trained_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """trained_with(evaluate, subject, options): the settings of the training that an evaluation begins."""

    def plan(subject: Subject, config: Config, *rest: object) -> None:
        raise Planned(config)

    def read(evaluate: Callable[..., object], subject: Subject, options: object) -> Config:
        with pytest.raises(Planned) as caught:
            evaluate(subject, options)
        return caught.value.args[0]

    monkeypatch.setattr(linear, "train_classifier", plan)
    monkeypatch.setattr(semi, "train_classifier", plan)
    return read
