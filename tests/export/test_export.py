"""Exports as a whole: which network, recalibration, the model card, mistakes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from momentum2.errors import UserError
from momentum2.export import export
from momentum2.runs.encoder import load_encoder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for i in range(6):
        folder = tmp_path / "photos" / ("cats" if i % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (80, 70, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def test_the_student_on_request(run: Path, tmp_path: Path):
    export(run, "timm", tmp_path / "student", network="student")
    export(run, "timm", tmp_path / "teacher")
    student, teacher = (load_file(tmp_path / n / "model.safetensors") for n in ("student", "teacher"))
    expected = load_encoder(run, "student").encoder.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in student.items())
    assert not torch.equal(student["conv1.weight"], teacher["conv1.weight"])
    assert "student of byol after 2 steps" in (tmp_path / "student" / "README.md").read_text()


def test_recalibrated_statistics_are_those_of_the_images(run: Path, tmp_path: Path, photos: Path):
    export(run, "timm", tmp_path / "out", recalibrate=photos)
    exported = load_encoder(tmp_path / "out" / "model.safetensors")
    original = load_encoder(run)
    files = sorted(photos.rglob("*.png"))
    batch = original.preprocess([Image.open(file) for file in files])  # all six are one batch
    expected = original.encoder.train()(batch)
    torch.testing.assert_close(exported(batch), expected, atol=1e-4, rtol=1e-4)
    before, after = original.encoder.state_dict(), exported.encoder.state_dict()
    assert torch.equal(before["layer1.0.conv1.weight"], after["layer1.0.conv1.weight"])
    assert "measured again on photos" in (tmp_path / "out" / "README.md").read_text()


def test_one_image_is_too_few_to_recalibrate(run: Path, tmp_path: Path, photos: Path):
    for file in sorted(photos.rglob("*.png"))[1:]:
        file.unlink()
    with pytest.raises(UserError, match="at least 2"):
        export(run, "timm", tmp_path / "out", recalibrate=photos)
    assert not (tmp_path / "out").exists()


def test_the_model_card_tells_what_is_known(run: Path, tmp_path: Path):
    result = {
        "evaluation": "knn",
        "data": "shapes test",
        "network": "teacher",
        "accuracy": {"top1": 61.25, "top5": None, "low": 60.0, "high": 62.5, "images": 4000},
    }
    (run / "results.json").write_text(json.dumps({"knn | shapes test | teacher": result}))
    try:
        lines = export(run, "torchvision", tmp_path / "out", license="apache-2.0")
    finally:
        (run / "results.json").unlink()
    text = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert text.startswith("---\nlicense: apache-2.0\n")
    assert f"```python\n{chr(10).join(lines.splitlines()[-3:])}\n```" in text
    assert "| training data | 64 images (shapes) at 64 px |" in text
    assert "| origin | teacher of byol after 2 steps |" in text
    assert "512 pooled features" in text
    assert "| knn, shapes test, teacher | top-1 61.25% (95% interval 60.00 to 62.50) |" in text
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]  # else an alarm of a busy machine
    assert f"| training loss | {losses[-1]:.4g} at step 2 |" in text
    assert "weight_momentum: 0.01" in text
    assert "root:" not in text  # where the images lay is nobody's business


def test_a_file_of_others_has_a_card_too(run: Path, tmp_path: Path):
    torch.save(load_encoder(run).encoder.state_dict(), tmp_path / "model.pth")
    export(tmp_path / "model.pth", "huggingface", tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| training data | unknown |" in text
    assert "None were measured." in text
    assert "license: unknown" in text


def test_mistakes_are_one_sentence(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match="Did you mean torchvision"):
        export(run, "torchvison", tmp_path / "out")
    with pytest.raises(UserError, match="Choose from torchvision, timm"):
        export(run, "caffe", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for occupied in ("full", "full/file"):
        with pytest.raises(UserError, match="already exists"):
            export(run, "timm", tmp_path / occupied)
    with pytest.raises(UserError, match="cannot be written"):
        export(run, "timm", tmp_path / "full" / "file" / "out")
    with pytest.raises(UserError, match="does not exist"):
        export(run, "timm", tmp_path / "out", recalibrate=tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    export(run, "timm", tmp_path / "empty")  # an empty folder is as good as none


def test_a_missing_extra_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'momentum2\[export\]'"):
        export(run, "onnx", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
