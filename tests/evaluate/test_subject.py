from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from momentum2.config import DataConfig
from momentum2.errors import UserError
from momentum2.evaluate import by_features
from momentum2.evaluate.features import extract
from momentum2.evaluate.subject import SubjectOptions, data_of, open_subject

ONE = SubjectOptions(threads=1)


def folders(root: Path, splits: dict[str, list[str]]) -> DataConfig:
    """Folders split/class with three images each; class "" puts them beside the classes."""
    rng = np.random.default_rng(0)
    for split, classes in splits.items():
        for name in classes:
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(3):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return DataConfig("folder", str(root), image_size=16, cache="off")


def test_a_run_is_evaluated_on_its_own_data(run: Path):
    with open_subject(run, ONE) as subject:
        assert subject.name == "teacher"
        assert subject.data_name == "pictures test"
        assert subject.directory == run
        assert len(subject.labeled.train) == 184
        assert len(subject.labeled.class_names) == 10
        assert not subject.encoder.training
        assert subject.spec.size == 16


def test_sources_of_one_encoder(run: Path):
    """Directory, file and last checkpoint hold the same network; student and third step are others."""
    found = {}
    for name, source, network in (
        ("run", run, None),
        ("file", run / "encoder.safetensors", None),
        ("last", run / "checkpoints" / "step-00000006", None),
        ("third", run / "checkpoints" / "step-00000003", None),
        ("student", run, "student"),
    ):
        with open_subject(source, replace(ONE, network=network)) as subject:
            found[name] = subject.name, subject.features(subject.labeled.test).features
            assert subject.directory == run
    assert [name for name, _ in found.values()] == [
        "teacher",
        "teacher",
        "teacher at step 6",
        "teacher at step 3",
        "student",
    ]
    assert torch.equal(found["run"][1], found["file"][1])
    assert torch.equal(found["run"][1], found["last"][1])
    assert not torch.equal(found["run"][1], found["third"][1])
    assert not torch.equal(found["run"][1], found["student"][1])


def test_a_bare_state_dict(run: Path, tmp_path: Path):
    """It has neither card nor config: stem and data are given by hand."""
    weights = tmp_path / "elsewhere" / "weights.safetensors"
    weights.parent.mkdir()
    save_file(load_file(run / "encoder.safetensors"), weights)
    options = replace(ONE, stem="small", data=data_of(run))
    with open_subject(weights, options) as subject, open_subject(run, ONE) as original:
        assert subject.name == "weights.safetensors"
        assert subject.directory == weights.parent
        test = subject.labeled.test
        assert torch.equal(subject.features(test).features, original.features(test).features)


def test_the_encoder_file_alone_knows_its_image_size(run: Path, tmp_path: Path):
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes((run / "encoder.safetensors").read_bytes())
    assert data_of(moved) == DataConfig("none", image_size=16)
    assert data_of(run).name == "folder"
    assert data_of(run / "checkpoints" / "step-00000003") == data_of(run)
    assert data_of(tmp_path / "nowhere.pth").image_size == 224


def test_floors(run: Path):
    with open_subject(run, ONE) as subject:
        floors = dict(subject.floors())
        again = dict(subject.floors())
        images = subject.labeled.train
        assert list(floors) == ["random initialization", "raw pixels", "whitened patches"]
        features = {name: subject.features(images, encoder).features for name, encoder in floors.items()}
        pixels = features["raw pixels"]
        assert pixels.shape == (184, 3 * 16 * 16)
        random = features["random initialization"]
        assert torch.equal(random, subject.features(images, again["random initialization"]).features)
        assert not torch.equal(random, subject.features(images).features)
        # Its statistics are those of the data: every channel of the first norm is standardized on it.
        encoder = floors["random initialization"]
        seen = []
        handle = encoder.bn1.register_forward_hook(lambda norm, inputs, output: seen.append(output.clone()))
        extract(encoder, images, subject.spec)
        handle.remove()
        normalized = torch.cat(seen).transpose(0, 1).flatten(1)
        assert normalized.mean(1).abs().max() < 0.05
        assert (normalized.std(1) - 1).abs().max() < 0.05


@pytest.mark.parametrize(
    ("weights", "name"),
    [("random", "random initialization"), ("pixels", "raw pixels"), ("patches", "whitened patches")],
)
def test_a_floor_in_place_of_the_weights(run: Path, weights: str, name: str):
    with open_subject(run, replace(ONE, weights=weights)) as subject:
        assert subject.name == name
        assert list(subject.floors()) == []
        assert subject.features(subject.labeled.test).features.isfinite().all()


def test_floors_learn_from_a_limited_number_of_images(run: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(by_features, "FLOOR_IMAGES", 50)
    seen = []

    def classify(x: Tensor, y: Tensor, test: Tensor, classes: int) -> Tensor:
        seen.append((len(x), len(y), len(y.unique())))
        return torch.zeros(len(test), classes)

    with open_subject(run, ONE) as subject:
        assert len(by_features.judge_floors(subject, classify)) == 3
        by_features.judge(subject, classify)
    assert [n for n, _, _ in seen] == [50, 50, 50, 184]
    assert seen[0][1] == 50
    assert seen[0][2] > 5  # of all classes


def test_wrong_backbone(run: Path, tmp_path: Path, shapes: DataConfig):
    with (
        pytest.raises(UserError, match="has backbone resnet18, not resnet50"),
        open_subject(run, replace(ONE, backbone="resnet50")),
    ):
        pass
    weights = tmp_path / "weights.pth"
    torch.save(nn.Linear(3, 2).state_dict(), weights)
    with pytest.raises(UserError), open_subject(weights, replace(ONE, backbone="resnet18", data=shapes)):
        pass


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (SubjectOptions(device="warp"), "^device warp is not a device"),
        (SubjectOptions(feature_batch=0), "^feature_batch must be at least 1"),
        (SubjectOptions(threads=-1), "^threads must be at least 1"),
    ],
)
def test_wrong_options(run: Path, options: SubjectOptions, sentence: str):
    with pytest.raises(UserError, match=sentence), open_subject(run, options):
        pass


def test_no_data(run: Path, tmp_path: Path):
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes((run / "encoder.safetensors").read_bytes())
    with (
        pytest.raises(UserError, match=r"^data.name is not set"),
        open_subject(moved, ONE),
    ):
        pass


@pytest.mark.parametrize(
    ("splits", "sentence"),
    [
        ({"train": ["a", "b"], "test": [""]}, "The test images have no labels, .* Put each class"),
        ({"train": [""], "test": ["a", "b"]}, "The training images have no labels"),
        ({"train": [""]}, "The training images have no labels"),  # not: divide them into splits
        (
            {"train": ["a", "b"], "test": ["a", "c"]},
            "no training image of class c, which has 3 test images",
        ),
        ({"train": ["a", "b"]}, "has no (folder|split) 'test'"),
        ({"train": ["a", "b"], "test": []}, "contains no images"),
    ],
)
def test_data_that_cannot_be_used_is_one_sentence(
    run: Path, tmp_path: Path, splits: dict[str, list[str]], sentence: str
):
    data = folders(tmp_path / "pictures", splits)
    if splits.get("test") == []:
        (tmp_path / "pictures" / "test").mkdir()
    with open_subject(run, replace(ONE, data=data)) as subject, pytest.raises(UserError, match=sentence):
        subject.labeled  # noqa: B018  (reading it is what fails)


def test_statistics_that_are_measured_again_are_those_of_the_training_images(run: Path):
    with open_subject(run, ONE) as before, open_subject(run, replace(ONE, recalibrate=True)) as after:
        assert (before.name, after.name) == ("teacher", "teacher, recalibrated")
        kept, again = before.encoder.state_dict(), after.encoder.state_dict()
        changed = {name for name in kept if not torch.equal(kept[name], again[name])}
        assert changed == {name for name in kept if "running_" in name or "num_batches" in name}
        seen: list[Tensor] = []
        first = next(m for m in after.encoder.modules() if isinstance(m, nn.BatchNorm2d))
        hook = first.register_forward_pre_hook(lambda norm, inputs: seen.append(inputs[0]))
        after.features(after.labeled.train)
        hook.remove()
        values = torch.cat(seen).double()
        assert len(values) == 184
        torch.testing.assert_close(first.running_mean.double(), values.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(first.running_var.double(), values.var((0, 2, 3), correction=0))
    with (
        pytest.raises(UserError, match=r"^recalibrate does not apply to weights pixels"),
        open_subject(run, replace(ONE, recalibrate=True, weights="pixels")),
    ):
        pass
