from dataclasses import replace

import pytest
import torch
from torch import nn

from momentum2.config import Config, DataConfig, MonitorConfig, TrainConfig
from momentum2.data import open_dataset
from momentum2.errors import SettingError
from momentum2.evaluate import online
from momentum2.evaluate.online import online_knn


class Oracle(nn.Module):
    """Knows the class by the mean color of images that were painted with it."""

    feature_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.mean((2, 3))


def test_the_first_encoder_is_scored(encoder: nn.Module, shapes: DataConfig):
    config = Config(eval_data=shapes, monitor=MonitorConfig(knn_every=1), train=TrainConfig(precision="fp32"))
    score = online_knn(config)
    assert score is not None
    encoder.train()
    first = score({"teacher": encoder, "student": Oracle()})
    assert list(first) == ["knn_top1"]
    assert 0 < first["knn_top1"] < 100
    assert encoder.training
    assert score({"teacher": encoder}) == first
    other = score({"teacher": Oracle()})
    assert other != first


def test_it_is_the_accuracy_of_the_test_split(tmp_path, encoder: nn.Module):
    """Two colors are two classes; three of the four test images lie in the right folder."""
    from PIL import Image

    for split, colors in (
        ("train", ["red", "red", "blue", "blue"]),
        ("test", ["red", "red", "blue", "red"]),
    ):
        for i, color in enumerate(colors):
            folder = tmp_path / split / ("a" if i < 2 else "b")
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), color).save(folder / f"{i}.png")
    data = DataConfig("folder", str(tmp_path), image_size=16, cache="off")
    score = online_knn(Config(eval_data=data, monitor=MonitorConfig(knn_every=1, knn_k=20)))
    assert score is not None
    assert score({"student": Oracle()}) == {"knn_top1": 75.0}  # k is no more than the bank


def test_nothing_to_score(shapes: DataConfig, tmp_path):
    assert online_knn(Config(monitor=MonitorConfig(knn_every=1))) is None  # no data
    assert online_knn(Config(eval_data=shapes, monitor=MonitorConfig(knn_every=0))) is None
    from PIL import Image

    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        Image.new("RGB", (16, 16)).save(tmp_path / split / "image.png")
    unlabeled = DataConfig("folder", str(tmp_path), cache="off")
    assert open_dataset(unlabeled).labels is None
    assert online_knn(Config(eval_data=unlabeled, monitor=MonitorConfig(knn_every=1))) is None


@pytest.mark.parametrize("size", [1, 5000])
def test_train_size_bounds_the_bank(encoder: nn.Module, shapes: DataConfig, size: int):
    config = Config(eval_data=replace(shapes, train_size=size), monitor=MonitorConfig(knn_every=1))
    assert online_knn(config) is not None


def test_a_mistake_is_one_of_the_evaluation_data():
    with pytest.raises(SettingError) as error:
        online_knn(Config(eval_data=DataConfig(root="/nowhere"), monitor=MonitorConfig(knn_every=1)))
    assert (error.value.setting, str(error.value)) == (
        "eval_data.root",
        "eval_data.root /nowhere does not exist.",
    )


def test_a_large_data_set_is_scored_on_a_choice_of_its_images(
    encoder: nn.Module, shapes: DataConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    sizes = []
    extract = online.extract
    monkeypatch.setattr(
        online,
        "extract",
        lambda e, data, *rest, **more: sizes.append(len(data)) or extract(e, data, *rest, **more),
    )
    monkeypatch.setattr(online, "BANK", 20)
    monkeypatch.setattr(online, "QUERIES", 10)
    config = Config(eval_data=shapes, monitor=MonitorConfig(knn_every=1), train=TrainConfig(precision="fp32"))
    with caplog.at_level("INFO", "momentum2"):
        score = online_knn(config)
    assert "Online kNN uses 20 of" in caplog.text
    assert score is not None
    assert 0 <= score({"teacher": encoder})["knn_top1"] <= 100
    assert sizes == [20, 10]
