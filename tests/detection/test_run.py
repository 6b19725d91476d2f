"""`momentum2 detect` as a whole: files, mistakes, resuming, several processes."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import momentum2 as m2
from momentum2 import backbones
from momentum2.api import pretrain
from momentum2.cli import main
from momentum2.config import Config, DataConfig, MethodConfig, ModelConfig, OptimConfig, TrainConfig
from momentum2.detection.finetune import with_encoder
from momentum2.detection.presets import DetectConfig, EncoderConfig, HeadConfig, preset
from momentum2.detection.saved import DetectorCard, architecture_of, load_detector, read_card, save_detector

Arguments = Callable[..., list[str]]
PROGRAM = "import sys; from momentum2.cli import main; sys.exit(main(['detect', *sys.argv[1:]]))"
KILLED_AFTER_A_CHECKPOINT = """
import os, signal
from momentum2.runs.checkpoint import Checkpoints

def begin(self, *arguments, begin=Checkpoints.begin):
    begin(self, *arguments)
    self.wait()
    os.kill(os.getpid(), signal.SIGKILL)

Checkpoints.begin = begin
"""


def detect(arguments: list[str]) -> int:
    return main(["detect", *arguments])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
def test_a_run_leaves_its_files_and_can_be_used(
    tmp_path: Path, arguments: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert detect(arguments(out, model="mask_rcnn", evaluate_every="1")) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["images"] == 5
    assert (
        set(results["bbox"])
        == {"AP", "AP50", "AP75", "APs", "APm", "APl", "per_class"}
        == set(results["segm"])
    )
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "alarm" not in line]  # of a busy machine
    assert lines[0]["step"] == 0
    assert "segm_AP50" in lines[0]
    assert {"loss", "mask", "rpn_box_reg"} <= lines[1].keys()
    with Image.open(out / "predictions.png") as picture:
        assert picture.size[0] > 4 * 300

    assert detect([str(out), "--eval-only", "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "results.json").read_text()) == results

    found = m2.evaluate_detector(out, overrides={"data": {"test_size": 5}}, out=tmp_path / "from Python")
    assert found == {kind: results[kind] for kind in ("bbox", "segm")}

    # Elsewhere by default; a file knows its sizes without a config beside it.
    assert detect([str(out / "detector.safetensors"), "--eval-only", "--data.test_size", "5"]) == 0
    assert json.loads((out / "evaluation" / "results.json").read_text()) == results
    assert json.loads((out / "results.json").read_text()) == results

    # What is decided at test time is obeyed; what was decided in training is refused, unless it is what it was.
    one = [
        str(out),
        "--eval-only",
        "--out",
        str(tmp_path / "one"),
        "--head.detections",
        "1",
        "--train.steps=6",
    ]
    assert detect([*one, "--head.score_threshold", "0.0", "--data.test_short_edge", "32"]) == 0
    found = json.loads((tmp_path / "one" / "detections.json").read_text())
    assert len(found) == 5
    assert {tuple(d["segmentation"]["size"]) for d in found} == {(48, 48)}  # scenes are as large as before
    assert detect([*one, "--head.score_threshold", "0.99", "--data.max_long_edge", "40"]) == 0
    assert json.loads((tmp_path / "one" / "detections.json").read_text()) == []
    capsys.readouterr()
    for flag, value in (
        ("--model", "fcos"),
        ("--head.fpn_channels", "64"),
        ("--encoder.width", "2"),
        ("--train.steps", "7"),
        ("--init", "encoder"),
    ):
        assert detect([str(out), "--eval-only", flag, value]) == 2
        said = capsys.readouterr().err
        assert f"{flag} is " in said
        assert f"and cannot be {value}" in said
        assert said.count("\n") == 1
    assert detect([str(out), "--images", str(tmp_path), "--data.test_size=2"]) == 2

    folder = tmp_path / "photos" / "holiday"
    folder.mkdir(parents=True)
    Image.fromarray(np.zeros((30, 50, 3), np.uint8)).save(folder / "beach.png")
    (folder / "broken.jpg").write_bytes(b"no")
    assert detect([str(out), "--images", str(tmp_path / "photos"), "--out", str(tmp_path / "found")]) == 0
    (found,) = json.loads((tmp_path / "found" / "detections.json").read_text())
    assert (found["file"], found["height"], found["width"]) == ("holiday/beach.png", 30, 50)
    assert all({"class", "score", "bbox", "segmentation"} <= d.keys() for d in found["detections"])
    assert (tmp_path / "found" / "pictures" / "holiday" / "beach.png.png").exists()
    capsys.readouterr()
    place = m2.detect_images(out, tmp_path / "photos", out=tmp_path / "again")
    assert (place / "detections.json").read_text() == (tmp_path / "found" / "detections.json").read_text()
    assert capsys.readouterr().out == ""


def test_initial_weights(tmp_path: Path, arguments: Arguments) -> None:
    """Random ones depend on the seed; those of a file reach the body, whose architecture the file tells."""
    torch.manual_seed(5)
    encoder = backbones.build("resnet18", "imagenet", 0.25)
    file = tmp_path / "supervised.safetensors"
    save_file({**encoder.state_dict(), "fc.weight": torch.zeros(10, 128), "fc.bias": torch.zeros(10)}, file)
    steps = {"train__steps": "1", "optim__lr": "0.0", "data__test_size": "1"}
    assert detect(arguments(tmp_path / "file", init=str(file), **steps)) == 0
    found = load_file(tmp_path / "file" / "detector.safetensors")
    for name, value in encoder.state_dict().items():
        if name.endswith(("weight", "bias")):  # statistics move even without a learning rate
            assert torch.equal(found[f"backbone.body.{name}"], value), name
    for out, seed in (("one", 0), ("same", 0), ("other", 1)):
        assert detect(arguments(tmp_path / out, train__seed=str(seed), **steps)) == 0
    one, same, other = (
        load_file(tmp_path / out / "detector.safetensors") for out in ("one", "same", "other")
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["backbone.body.conv1.weight"], other["backbone.body.conv1.weight"])


def test_the_student_or_the_teacher_of_a_run(tmp_path: Path) -> None:
    model = ModelConfig("resnet18", "small", 0.125, projector_hidden=8, projector_out=4)
    data = DataConfig("shapes", image_size=32, train_size=16, cache="off")
    train = TrainConfig(steps=2, batch_size=8, threads=1, precision="fp32")
    method = MethodConfig("byol", export="student", weight_momentum=0.1)
    assert pretrain(
        Config(method=method, model=model, data=data, train=train, optim=OptimConfig(lr=1.0)), tmp_path
    )
    weights = {}
    for network in ("teacher", "student", None):
        _, encoder = with_encoder(DetectConfig(network=network), str(tmp_path))
        weights[network] = encoder.state_dict()["conv1.weight"]
    saved = load_file(tmp_path / "checkpoints" / "step-00000002" / "shared.safetensors")
    assert torch.equal(weights["teacher"], saved["method/teacher.network.encoder.conv1.weight"])
    assert torch.equal(weights["student"], saved["method/student.encoder.conv1.weight"])
    assert torch.equal(weights[None], weights["student"])
    assert not torch.equal(weights["teacher"], weights["student"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--init is encoder, which needs RUN"),
        (
            ["--init=random", "--network=student", "--out=x"],
            "--network chooses an encoder of RUN, but init is random",
        ),
        (["--init", "random"], "--out DIR"),
        (
            ["--model", "yolo", "--out", "x"],
            "--model takes faster_rcnn, mask_rcnn, cascade_rcnn, retinanet, fcos, not 'yolo'",
        ),
        (["--modle", "fcos"], "Did you mean --model"),
        (["nowhere", "--out", "x"], "no run directory or file of weights called nowhere"),
        (["nowhere", "--eval-only"], "nowhere has no fine-tuned detector"),
        (["--eval-only"], "Missing argument RUN"),
        (
            ["run", "--eval-only", "--images=photos"],
            "--images runs the detector, while --eval-only evaluates it",
        ),
        (["run", "--eval-only", "--resume=must"], "--resume is for training"),
        (["--init=random", "--out=x", "--data.name=coco"], "--data.root is required"),
        (["--init=random", "--out=x", "--train.batch_size=0"], "--train.batch_size"),
        (
            ["--init=random", "--out=x", "--data.short_edges=[]"],
            "--data.short_edges must have at least 1 value",
        ),
        (["--init=random", "--out=x", "--monitor.log_every=0"], "--monitor.log_every must be at least 1"),
        (["--init=random", "--out=x", "--train.checkpoint_every=0"], "--train.checkpoint_every must be"),
        (["--init=random", "--out=x", "--data.workers=-1"], "--data.workers must be from 0 to 512"),
        (["--init=random", "--out=x", "--optim.lr=-1"], "--optim.lr must be at least 0"),
        (
            ["--init=random", "--out=x", "--train.devices=2"],
            "--train.devices is only for pretraining",
        ),
        (["--init=random", "--out=x", "--encoder.backbone=vgg11_bn"], "VGG has no maps of several strides"),
    ],
)
def test_mistakes_are_one_sentence(
    given: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if given == []:
        given = ["--out", "x"]
    assert detect(given) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "x" / "checkpoints").exists()


def test_a_network_that_was_named_has_no_stem_of_the_preset(
    tmp_path: Path, arguments: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(
        tmp_path / "run", model="retinanet", encoder__backbone="timm/test_vit", train__steps="1"
    )
    given.append("--encoder.options=patch_size=8,depth=1")
    assert detect(given) == 2
    assert "Only torchvision's ResNets have a stem, a width" in capsys.readouterr().err
    assert detect([word for word in given if not word.startswith("--encoder.width")]) == 0
    assert read_card(tmp_path / "run").encoder.backbone == "timm/test_vit"
    assert preset("fcos", "shapes", "resnet50").encoder == preset("fcos", "shapes").encoder


def test_a_detector_on_a_network_with_options_is_loaded_as_it_was(tmp_path: Path) -> None:
    encoder = EncoderConfig("timm/test_vit", options=["patch_size=8", "depth=1"])
    card = DetectorCard("retinanet", encoder, HeadConfig(fpn_channels=32), 48, 64, ("disk",), (1,))
    detector = card.build(backbones.of(architecture_of(encoder)))
    save_detector(tmp_path / "detector.safetensors", detector, card)
    again = load_detector(tmp_path, read_card(tmp_path))
    image = torch.rand(3, 40, 56)
    assert torch.equal(detector.eval().detect(image)["scores"], again.detect(image)["scores"])
    for name, tensor in detector.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_a_detector_of_another_version_is_named_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "detector.safetensors"
    card = {"model": "fcos", "encoder": {}, "head": {"gone": 1}}
    save_file({"weight": torch.zeros(1)}, path, {"momentum2-detector": json.dumps(card)})
    before = path.read_bytes()
    assert detect([str(path), "--eval-only"]) == 2
    assert "detector.safetensors was written by another version of momentum2" in capsys.readouterr().err
    assert path.read_bytes() == before
    path.write_bytes(before[:-2])
    assert detect([str(path), "--eval-only"]) == 2
    assert "is corrupt or not a detector" in capsys.readouterr().err


def test_boxes_alone_train_a_faster_rcnn(
    tmp_path: Path, arguments: Arguments, capsys: pytest.CaptureFixture[str]
) -> None:
    """Data in COCO's format without masks: a model that needs some says so before it begins."""
    (tmp_path / "annotations").mkdir()
    (tmp_path / "photos").mkdir()
    images = [{"id": i, "file_name": f"{i}.png", "height": 40, "width": 50 - 3 * i} for i in range(4)]
    for image in images:
        Image.fromarray(np.full((40, image["width"], 3), 90, np.uint8)).save(
            tmp_path / "photos" / str(image["file_name"])
        )
    boxes = [{"image_id": i, "category_id": 1, "bbox": [4, 5, 20, 10 + i]} for i in range(4)]
    content = {"images": images, "categories": [{"id": 1, "name": "cat"}], "annotations": boxes}
    (tmp_path / "annotations" / "instances_photos.json").write_text(json.dumps(content))
    changes = {
        "data__name": "coco",
        "data__root": str(tmp_path),
        "data__split": "photos",
        "data__test_split": "photos",
        "train__steps": "1",
    }
    assert detect(arguments(tmp_path / "run", model="mask_rcnn", **changes)) == 2
    said = capsys.readouterr().err
    assert "--model needs masks, but " in said
    assert "Choose faster_rcnn, retinanet or fcos." in said
    assert not (tmp_path / "run").exists()
    assert detect(arguments(tmp_path / "run", model="faster_rcnn", **changes)) == 0
    assert set(json.loads((tmp_path / "run" / "results.json").read_text())) == {"images", "style", "bbox"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["cascade_rcnn", "fcos"])
def test_a_run_killed_in_the_middle_ends_with_the_same_bits(
    tmp_path: Path, arguments: Arguments, warm_python: str, model: str
) -> None:
    changes = {"model": model, "train__steps": "5"}
    assert detect(arguments(tmp_path / "whole", **changes)) == 0
    program = KILLED_AFTER_A_CHECKPOINT + PROGRAM
    done = subprocess.run([warm_python, "-c", program, *arguments(tmp_path / "cut", **changes)], timeout=1800)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-00000002"]
    assert not (tmp_path / "cut" / "detector.safetensors").exists()
    assert detect(arguments(tmp_path / "cut", **changes)) == 0
    for name in ("detector.safetensors", "detections.json", "results.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.slow
def test_two_processes_train_and_evaluate_each_image_once(
    tmp_path: Path, arguments: Arguments, warm_python: str
) -> None:
    out = tmp_path / "run"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [warm_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    changes = {"model": "mask_rcnn", "train__steps": "2", "head__score_threshold": "0.0"}
    subprocess.run(
        [*command, str(program), *arguments(out, **changes)], env=environment, check=True, timeout=1800
    )
    detections = json.loads((out / "detections.json").read_text())
    assert {d["image_id"] for d in detections} == set(range(5))
    assert len({json.dumps(d) for d in detections}) == len(detections)
    # One process finds the same with that detector.
    assert detect([str(out), "--eval-only", "--out", str(tmp_path / "alone")]) == 0
    for name in ("detections.json", "results.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (out / name).read_bytes(), name
