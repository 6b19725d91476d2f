import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from momentum2.api import evaluate_knn
from momentum2.config import Config, DataConfig, ModelConfig, MonitorConfig, TrainConfig
from momentum2.data import open_dataset
from momentum2.errors import SettingError
from momentum2.evaluate import online
from momentum2.evaluate.online import online_knn
from momentum2.evaluate.subject import SubjectOptions, open_subject
from momentum2.runs.handle import Run
from momentum2.runs.metrics import floors_in


class Oracle(nn.Module):
    """Knows the class by the mean color of images that were painted with it."""

    feature_dim = 3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.mean((2, 3))


TINY = ModelConfig("resnet18", "small", width=0.125)


def test_the_first_encoder_is_scored(encoder: nn.Module, shapes: DataConfig, tmp_path: Path):
    config = Config(
        eval_data=shapes, monitor=MonitorConfig(knn_every=1), train=TrainConfig(precision="fp32"), model=TINY
    )
    score = online_knn(config, tmp_path, 9)
    assert score is not None
    encoder.train()
    first = score({"teacher": encoder, "student": Oracle()}, 5)
    floors = ["floor_random", "floor_pixels", "floor_patches"]
    assert list(first) == ["knn_top1", "knn_interval", "knn_tests", "knn_images", "chance", *floors]
    assert 0 < first["knn_top1"] < 100
    tests = len(open_dataset(shapes, "test"))
    share = first["knn_top1"] / 100
    assert first["knn_interval"] == pytest.approx(196 * (share * (1 - share) / tests) ** 0.5)
    assert first["knn_images"] == 300
    assert encoder.training
    assert score({"teacher": encoder}, 5) == first
    other = score({"teacher": Oracle()}, 5)
    assert other["knn_top1"] != first["knn_top1"]
    assert all(other[floor] == first[floor] for floor in floors)
    # Before training, the network is the untrained one among the floors, with the data's own statistics.
    assert score({"teacher": encoder}, 0)["knn_top1"] == first["floor_random"]


def test_floors_are_those_of_evaluate_knn(run: Path):
    """The last online kNN of a run and `evaluate knn` agree, floors included."""
    options = SubjectOptions(threads=1, precision="fp32")
    found = evaluate_knn(run, subject=options)
    config = replace(Run(run).config, monitor=MonitorConfig(knn_every=1))
    score = online_knn(config, run, 6)
    assert score is not None
    with open_subject(run, options) as subject:
        last = score({"teacher": subject.encoder}, 6)
    assert last["knn_images"] == 184
    assert found.accuracy.top1 == pytest.approx(last["knn_top1"], abs=1e-3)
    assert floors_in(last) == pytest.approx(found.floors, abs=1e-3)
    assert list(found.floors) == ["random initialization", "raw pixels", "whitened patches"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, **last}) + "\n")
    assert Run(run).floors == floors_in(last)


def test_fewer_neighbors_until_the_last_step(shapes: DataConfig, tmp_path: Path, monkeypatch):
    monitor = MonitorConfig(knn_every=1, knn_images=40)
    config = Config(eval_data=shapes, monitor=monitor, train=TrainConfig(precision="fp32"), model=TINY)
    score = online_knn(config, tmp_path, 9)
    assert score is not None
    start, middle, end = (score({"teacher": Oracle()}, done) for done in (0, 4, 9))
    assert [found["knn_images"] for found in (start, middle, end)] == [40, 40, 300]
    assert middle["floor_pixels"] != end["floor_pixels"]
    # A run that resumes does not measure its floors again: they are in its metrics.
    lines = [json.dumps({"step": step, **found}) for step, found in ((4, middle), (9, end))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("momentum2.evaluate.online.patch_encoder", None)
    again = online_knn(config, tmp_path, 9)
    assert again is not None
    assert again({"teacher": Oracle()}, 4) == middle
    assert again({"teacher": Oracle()}, 9) == end


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
    config = Config(eval_data=data, monitor=MonitorConfig(knn_every=1, knn_k=20), model=TINY)
    score = online_knn(config, tmp_path, 9)
    assert score is not None
    found = score({"student": Oracle()}, 3)
    assert found["knn_top1"] == found["floor_pixels"] == 75.0  # k is no more than the bank
    assert found["chance"] == 50.0


def test_nothing_to_score(shapes: DataConfig, tmp_path):
    assert online_knn(Config(monitor=MonitorConfig(knn_every=1)), tmp_path, 9) is None  # no data
    assert online_knn(Config(eval_data=shapes, monitor=MonitorConfig(knn_every=0)), tmp_path, 9) is None
    from PIL import Image

    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        Image.new("RGB", (16, 16)).save(tmp_path / split / "image.png")
    unlabeled = DataConfig("folder", str(tmp_path), cache="off")
    assert open_dataset(unlabeled).labels is None
    assert online_knn(Config(eval_data=unlabeled, monitor=MonitorConfig(knn_every=1)), tmp_path, 9) is None


@pytest.mark.parametrize("size", [1, 2, 50])
def test_train_size_bounds_the_bank(encoder: nn.Module, shapes: DataConfig, size: int):
    data = replace(shapes, train_size=size, test_split="1%")
    score = online_knn(
        Config(eval_data=data, monitor=MonitorConfig(knn_every=1), model=TINY), Path("nowhere"), 9
    )
    assert score is not None
    found = score({"student": Oracle()}, 5)
    assert found["knn_images"] == size
    assert ("floor_patches" in found) == (size > 1)


def test_a_mistake_is_one_of_the_evaluation_data():
    with pytest.raises(SettingError) as error:
        online_knn(
            Config(eval_data=DataConfig(root="/nowhere"), monitor=MonitorConfig(knn_every=1)),
            Path("nowhere"),
            9,
        )
    assert (error.value.setting, str(error.value)) == (
        "eval_data.root",
        "eval_data.root /nowhere does not exist.",
    )


def test_a_large_data_set_is_scored_on_a_choice_of_its_images(
    encoder: nn.Module, shapes: DataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    score = online_knn(config, tmp_path, 1)
    assert score is not None
    assert 0 <= score({"teacher": encoder}, 1)["knn_top1"] <= 100
    assert sizes[-2:] == [20, 10]
    assert set(sizes) == {20, 10}
