"""Folders that divide a data set are not taken for its classes, and a plan says what was taken for what."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from momentum2 import plan, recipe
from momentum2.config import DataConfig
from momentum2.data import open_dataset
from momentum2.data.layout import split_in, split_word
from momentum2.data.opening import find_data
from momentum2.errors import UserError


@pytest.mark.parametrize(
    ("name", "word"),
    [
        *(
            ("train", "train"),
            ("train2017", "train"),
            ("val_2", "val"),
            ("Train", "train"),
            ("TEST-1", "test"),
        ),
        *(
            ("validation", "validation"),
            ("valid01", "valid"),
            ("training", "train"),
            ("unlabeled2017", "unlabeled"),
        ),
        *(
            ("trains", None),
            ("cats", None),
            ("trainers2", None),
            ("2017", None),
            ("test_dogs", None),
            ("", None),
        ),
    ],
)
def test_which_folders_are_splits(name: str, word: str | None) -> None:
    assert split_word(name) == word


@pytest.mark.parametrize(
    ("name", "word"),
    [
        *(
            ("train-0001.tar", "train"),
            ("x_val_01.tar", "val"),
            ("test/01.tar", "test"),
            ("a.train.tar", "train"),
        ),
        *(("imagenet-validation-000.tar", "validation"), ("train001.tar", "train")),
        *(("retrained-01.tar", None), ("01.tar", None), ("values-1.tar", None)),
    ],
)
def test_which_shards_say_a_split(name: str, word: str | None) -> None:
    assert split_in(name) == word


def fill(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(folder / f"{i:02}.png")


def test_the_splits_of_coco_are_no_classes(tmp_path: Path) -> None:
    fill(tmp_path / "coco" / "train2017", 16)
    fill(tmp_path / "coco" / "val2017", 8)
    root = str(tmp_path / "coco")
    dataset = open_dataset(DataConfig(root=root))
    assert len(dataset) == 16
    assert dataset.labels is None
    assert len(open_dataset(DataConfig(root=root), "val")) == 8
    assert find_data(root, DataConfig()).test_split == "val"
    config = recipe("folder", {"data.root": root, "train.device": "cpu"})
    assert config.eval_data.name == "none"
    lines = dict(plan(config))
    assert lines["labels"].startswith("none")
    assert "test" not in lines
    fill(tmp_path / "coco" / "train2014", 3)
    with pytest.raises(UserError, match="several folders for split 'train': train2014, train2017"):
        open_dataset(DataConfig(root=root))
    assert len(open_dataset(DataConfig(root=root, split="train2014"))) == 3


def test_the_plan_names_classes_test_images_and_chance(tmp_path: Path) -> None:
    for split, counts in (("train2020", (9, 5)), ("test2020", (3, 1))):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            fill(tmp_path / "pets" / split / name, count)
    config = recipe("folder", {"data.root": str(tmp_path / "pets"), "train.device": "cpu"})
    lines = dict(plan(config))
    assert lines["labels"] == "2 classes: cat 9, dog 5"
    assert lines["test"] == "4 images (test), chance 75.0%: its largest class"


def test_many_classes_are_summed_up(make_folder: Callable[..., Path]) -> None:
    root = make_folder(24, classes=12)
    lines = dict(plan(recipe("folder", {"data.root": str(root), "train.device": "cpu"})))
    assert lines["labels"].startswith("12 classes: class0 2, ")
    assert lines["labels"].endswith(" and 2 more of 2 to 2 images")


def test_progress_is_said_every_ten_seconds_through_pipes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from momentum2 import terminal

    clock = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: clock[0])
    caplog.set_level("INFO", "momentum2")
    with terminal.progress("Decoding images", 100, "images") as advance:
        for _ in range(50):
            clock[0] += 0.5
            advance(2)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "Decoding images: 40 of 100 images, 15 s left",
        "Decoding images: 80 of 100 images, 5 s left",
    ]
    caplog.clear()
    with terminal.progress("Listing images", None, "images") as advance:
        clock[0] += 11
        advance(1234)
    assert caplog.records[0].getMessage() == "Listing images: 1,234 images"
    monkeypatch.setenv("RANK", "1")
    with terminal.progress("Listing images", None, "images") as advance:
        clock[0] += 11
        advance(1)
    assert len(caplog.records) == 1
