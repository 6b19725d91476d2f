"""A run to export: trained for two steps, so that weights and statistics are nobody's defaults."""

from pathlib import Path

import pytest

from momentum2.api import pretrain
from momentum2.config import Config, DataConfig, ModelConfig, MonitorConfig, TrainConfig


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Config(
        model=ModelConfig("resnet18", projector_hidden=16, projector_out=8),
        data=DataConfig("shapes", image_size=64, train_size=64, cache="off"),
        train=TrainConfig(steps=2, batch_size=8, threads=1),
        monitor=MonitorConfig(log_every=1, report=False),
    )
    out = tmp_path_factory.mktemp("runs") / "shapes"
    assert pretrain(config, out).finished
    return out
