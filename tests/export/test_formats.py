"""What is exported is loaded by the very lines that were printed, and gives the encoder's features."""

import ast
import json
import os
import pickletools
import re
import runpy
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import momentum2
from momentum2 import backbones
from momentum2._torchvision import torchvision
from momentum2.errors import UserError
from momentum2.export import FORMATS, export
from momentum2.export.detectron2 import renamed
from momentum2.runs.card import EncoderCard
from momentum2.runs.encoder import load_encoder, save_encoder
from momentum2.weights import Architecture

IMAGES = torch.randn(7, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def own_lines(lines: str) -> str:
    """The lines without the one that only machines like this one need."""
    return lines.removeprefix("import momentum2  # torchvision needs it here\n")


def loaded_by(lines: str) -> dict[str, object]:
    """What is defined after the printed lines have been run."""
    assert len(own_lines(lines).splitlines()) == 3
    names: dict[str, object] = {}
    exec(lines, names)
    return names


@torch.no_grad()
def features(model, images: Tensor = IMAGES) -> Tensor:
    assert not model.training
    return model(images)


def picture() -> Image.Image:
    y, x = np.mgrid[:96, :128]
    return Image.fromarray(np.stack([x * 2, y * 2, x + y], 2).astype(np.uint8))


@pytest.mark.parametrize("format", ["torchvision", "timm", "huggingface"])
def test_the_printed_lines_give_the_same_features(run: Path, tmp_path: Path, format: str):
    out = tmp_path / "out"
    names = loaded_by(export(run, format, out))
    encoder = load_encoder(run)
    torch.testing.assert_close(features(names["model"]), features(encoder), atol=1e-6, rtol=0)
    if "transform" in names:
        ours, theirs = encoder.preprocess(picture()), names["transform"](picture())
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().mean() < 0.03  # two rounds of rounding to 8 bits against one
    assert not [path for path in tmp_path.iterdir() if path != out]  # nothing temporary is left


@pytest.mark.slow
@pytest.mark.parametrize("format", ["torchvision", "timm", "onnx"])
def test_the_printed_lines_run_in_a_fresh_process(run: Path, tmp_path: Path, format: str):
    lines = export(run, format, tmp_path / "out")
    subprocess.run([sys.executable, "-W", "error", "-c", lines], cwd=tmp_path, check=True)


def test_both_torchvision_files_load_strictly(run: Path, tmp_path: Path):
    export(run, "torchvision", tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "MODEL_CARD.md",
        "model.pth",
        "model.safetensors",
        "preprocessing.json",
    ]
    expected = load_encoder(run).encoder.state_dict()
    for state in (
        torch.load(tmp_path / "out" / "model.pth", weights_only=True),
        load_file(tmp_path / "out" / "model.safetensors"),
    ):
        network = torchvision.models.resnet18(weights=None)
        found = network.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["fc.weight", "fc.bias"], [])
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    again = momentum2.load_encoder(tmp_path / "out" / "model.safetensors")
    assert again.card == load_encoder(run).card


def test_a_network_with_another_head_goes_to_torchvision(tmp_path: Path):
    source = saved(tmp_path, "mnasnet0_5")
    names = loaded_by(export(source, "torchvision", tmp_path / "out"))
    torch.testing.assert_close(features(names["model"]), features(load_encoder(source)), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_onnx_for_any_batch_stem_and_width(tmp_path: Path):
    source = saved(tmp_path, "resnet18", "small", 0.25)
    names = loaded_by(export(source, "onnx", tmp_path / "out"))
    encoder = load_encoder(source)
    for n in (1, 7):
        found = torch.from_numpy(names["model"](IMAGES[:n].numpy()))
        torch.testing.assert_close(found, features(encoder, IMAGES[:n]), atol=1e-4, rtol=0)
    told = names["session"].get_modelmeta().custom_metadata_map
    assert json.loads(told["preprocessing"]) == json.loads(
        (tmp_path / "out" / "preprocessing.json").read_text()
    )
    assert json.loads(told["momentum2"])["backbone"] == "resnet18"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "MODEL_CARD.md",
        "model.onnx",
        "preprocessing.json",
    ]


def saved(
    folder: Path,
    name: str,
    stem: str = "imagenet",
    width: float = 1.0,
    perturbed: bool = True,
    options: tuple[str, ...] = (),
    channels: int = 3,
) -> Path:
    """An encoder file of random weights, and statistics that are not the initial ones."""
    torch.manual_seed(0)
    architecture = backbones.inspect(Architecture(name, stem, width, options, channels), (64,)).architecture
    encoder = backbones.of(architecture)
    if perturbed:
        encoder(torch.randn(4, channels, 64, 64))
    card = EncoderCard.of_foreign(architecture, encoder.feature_dim, 64)
    card = replace(card, mean=card.mean[:channels], std=card.std[:channels])
    file = folder / f"{name.replace('/', '-')}.safetensors"
    save_encoder(file, encoder, card)
    return file


IN_OTHER_HANDS = """
import sys
import momentum2._torchvision  # so that torchvision loads beside a torch without CUDA
import torch
from transformers import AutoImageProcessor, AutoModel, TimmWrapperModel
import timm

images, *folders = sys.argv[1:]
found = []
with torch.no_grad():
    for folder in folders:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        x = torch.load(images)[:, : timm.data.resolve_model_data_config(model)["input_size"][0]].contiguous()
        found.append([model(x)])
        found[-1] += [kind.from_pretrained(folder).eval()(x).pooler_output for kind in (TimmWrapperModel, AutoModel)]
        assert AutoImageProcessor.from_pretrained(folder).data_config["input_size"][1] == 64
torch.save(found, images)
"""


@pytest.mark.slow
def test_timm_and_transformers_load_the_folders(tmp_path: Path, warm_python: str):
    """One process of theirs for all, because importing transformers takes longer than the rest."""
    sources = [
        saved(tmp_path, "resnet18"),
        saved(tmp_path, "timm/test_vit", options=("patch_size=8", "drop_path_rate=0.1")),
        saved(tmp_path, "timm/vit_tiny_patch16_224", options=("depth=1",)),
        saved(tmp_path, "timm/test_convnext"),
        saved(tmp_path, "timm/test_efficientnet", channels=2),
    ]
    for i, source in enumerate(sources):
        export(source, "huggingface" if i % 2 else "timm", tmp_path / f"out{i}")
    torch.save(IMAGES, tmp_path / "images.pt")
    folders = [str(tmp_path / f"out{i}") for i in range(len(sources))]
    environment = dict(os.environ, PYTHONPATH=str(Path(momentum2.__file__).parents[1]), HF_HUB_OFFLINE="1")
    done = subprocess.run(
        [warm_python, "-c", IN_OTHER_HANDS, str(tmp_path / "images.pt"), *folders],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for source, theirs in zip(sources, torch.load(tmp_path / "images.pt"), strict=True):
        encoder = load_encoder(source)
        expected = features(encoder, IMAGES[:, : encoder.card.channels].contiguous())
        assert torch.equal(expected, theirs[0]), source.name
        assert all(torch.allclose(expected, found, atol=1e-6) for found in theirs), source.name
    card = (tmp_path / "out1" / "README.md").read_text()
    assert "library_name: timm" in card
    assert "hf upload ORGANIZATION/NAME" in card
    assert (
        momentum2.load_encoder(tmp_path / "out1" / "model.safetensors").card == load_encoder(sources[1]).card
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["timm/test_vit", "timm/test_convnext", "timm/test_efficientnet"])
def test_onnx_of_other_families(tmp_path: Path, name: str):
    source = saved(tmp_path, name)
    names = loaded_by(export(source, "onnx", tmp_path / "out"))
    found = torch.from_numpy(names["model"](IMAGES.numpy()))
    torch.testing.assert_close(found, features(load_encoder(source)), atol=1e-4, rtol=1e-4)
    assert "library_name" not in (tmp_path / "out" / "MODEL_CARD.md").read_text()


@pytest.mark.parametrize("name", ["torchvision/resnet18", "convnext_tiny"])
def test_torchvisions_networks_by_their_full_names(tmp_path: Path, name: str):
    source = saved(tmp_path, name)
    names = loaded_by(export(source, "torchvision", tmp_path / "out"))
    torch.testing.assert_close(features(names["model"]), features(load_encoder(source)), atol=1e-5, rtol=0)


def documented_names(blocks: tuple[int, ...], convolutions: int, shortcut_in_res2: bool) -> dict[str, str]:
    """detectron2's names of a ResNet's bottom-up backbone, each with torchvision's name for the tensor."""

    def unit(theirs: str, ours: str, norm: str) -> dict[str, str]:
        statistics = ("weight", "bias", "running_mean", "running_var")
        return {f"{theirs}.weight": f"{ours}.weight"} | {
            f"{theirs}.norm.{s}": f"{norm}.{s}" for s in statistics
        }

    names = unit("stem.conv1", "conv1", "bn1")
    for stage, count in enumerate(blocks):
        for block in range(count):
            theirs, ours = f"res{stage + 2}.{block}", f"layer{stage + 1}.{block}"
            for c in range(1, convolutions + 1):
                names |= unit(f"{theirs}.conv{c}", f"{ours}.conv{c}", f"{ours}.bn{c}")
            if block == 0 and (stage > 0 or shortcut_in_res2):
                names |= unit(f"{theirs}.shortcut", f"{ours}.downsample.0", f"{ours}.downsample.1")
    return names


@pytest.mark.parametrize(
    ("name", "blocks", "convolutions"), [("resnet50", (3, 4, 6, 3), 3), ("resnet18", (2, 2, 2, 2), 2)]
)
def test_detectron2_has_exactly_its_names(
    tmp_path: Path, name: str, blocks: tuple[int, ...], convolutions: int
):
    source = saved(tmp_path, name)
    export(source, "detectron2", tmp_path / "out")
    content = torch.load(tmp_path / "out" / "model.pth", weights_only=True)
    assert content.keys() == {"model", "__author__", "matching_heuristics"}
    assert content["matching_heuristics"] is True
    state = load_encoder(source).encoder.state_dict()
    names = documented_names(blocks, convolutions, shortcut_in_res2=convolutions == 3)
    assert content["model"].keys() == names.keys()
    assert set(names.values()) == {k for k in state if not k.endswith("num_batches_tracked")}
    for theirs, ours in names.items():
        assert torch.equal(content["model"][theirs], state[ours]), theirs
    settings = yaml.safe_load((tmp_path / "out" / "detectron2.yaml").read_text())
    assert settings["MODEL"]["PIXEL_MEAN"] == [123.675, 116.28, 103.53]
    assert settings["MODEL"]["PIXEL_STD"] == [58.395, 57.12, 57.375]
    assert settings["INPUT"]["FORMAT"] == "RGB"
    assert settings["MODEL"]["RESNETS"] == {
        "DEPTH": int(name.removeprefix("resnet")),
        "NUM_GROUPS": 1,
        "WIDTH_PER_GROUP": 64,
        "STEM_OUT_CHANNELS": 64,
        "RES2_OUT_CHANNELS": 256 if convolutions == 3 else 64,
        "STRIDE_IN_1X1": False,
        "NORM": "SyncBN",
    }
    assert settings["MODEL"]["FPN"]["NORM"] == "SyncBN"
    assert settings["MODEL"]["BACKBONE"]["FREEZE_AT"] == 0


def test_detectron2_gets_weights_without_numpy(tmp_path: Path):
    """A pickle of arrays would name modules of this NumPy, which another cannot find."""
    export(saved(tmp_path, "torchvision/resnet18"), "detectron2", tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out" / "model.pth") as archive:
        (pickled,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        named = {str(argument) for code, argument, _ in pickletools.genops(archive.read(pickled)) if argument}
    assert any("torch" in word for word in named)
    assert not [word for word in named if "numpy" in word]


#: Steps and milestones of each config, in the paper's and MoCo's schedules.
DETECTRON2 = {
    "mask_rcnn_1x": (90_000, [60_000, 80_000]),
    "mask_rcnn_2x": (180_000, [120_000, 160_000]),
    "cascade_rcnn_1x": (90_000, [60_000, 80_000]),
    "cascade_rcnn_2x": (180_000, [120_000, 160_000]),
    "retinanet_1x": (90_000, [60_000, 80_000]),
    "retinanet_2x": (180_000, [120_000, 160_000]),
    "lvis": (90_000, [60_000, 80_000]),
    "voc_c4_24k": (24_000, [18_000, 22_000]),
    "fcos_1x": (90_000, None),
    "fcos_2x": (180_000, None),
}


def test_detectron2_has_a_config_for_each_table(tmp_path: Path):
    export(saved(tmp_path, "resnet50", perturbed=False), "detectron2", tmp_path / "out")
    files = {path.stem: yaml.safe_load(path.read_text()) for path in (tmp_path / "out" / "configs").iterdir()}
    assert files.keys() == DETECTRON2.keys()
    for name, (steps, milestones) in DETECTRON2.items():
        found = files[name]
        assert found.pop("BASE").endswith((".yaml", ".py"))
        if milestones is None:
            (words,) = found.values()
            values = dict(word.split("=", 1) for word in words)
            assert values["train.max_iter"] == str(steps)
            assert float(values["lr_multiplier.warmup_length"]) * steps == pytest.approx(1000)
            assert values["model.backbone.bottom_up.freeze_at"] == "0"
            assert [v for k, v in values.items() if k.endswith("norm")] == ["SyncBN"] * 3
            assert values["dataloader.train.mapper.augmentations.0.short_edge_length"] == "[800]"
            continue
        assert (found["SOLVER"]["MAX_ITER"], found["SOLVER"]["STEPS"]) == (steps, milestones)
        assert found["MODEL"]["BACKBONE"]["FREEZE_AT"] == 0
        assert found["MODEL"]["RESNETS"]["NORM"] == found["MODEL"]["FPN"]["NORM"] == "SyncBN"
        assert found["INPUT"]["FORMAT"] == "RGB"
        assert ("PRECISE_BN" in found.get("TEST", {})) == (name == "voc_c4_24k")
    program = ast.parse((tmp_path / "out" / "train.py").read_text())
    assert "Res5ROIHeadsExtraNorm" in {n.name for n in program.body if isinstance(n, ast.ClassDef)}
    assert files["voc_c4_24k"]["MODEL"]["ROI_HEADS"]["NAME"] == "Res5ROIHeadsExtraNorm"


@pytest.mark.filterwarnings("ignore")  # of detectron2's own making
def test_detectron2_trains_every_table_with_nothing_frozen(tmp_path: Path):
    """Builds each model by train.py, loads the weights and takes a step on a made-up image, where detectron2 is."""
    pytest.importorskip("detectron2")
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.config import instantiate
    from detectron2.modeling import build_model
    from detectron2.structures import BitMasks, Boxes, Instances
    from detectron2.utils.events import EventStorage

    source = saved(tmp_path, "resnet50")
    export(source, "detectron2", tmp_path / "out")
    train = runpy.run_path(str(tmp_path / "out" / "train.py"))
    state = load_encoder(source).encoder.state_dict()
    shown = Instances((64, 64))
    shown.gt_boxes, shown.gt_classes = Boxes(torch.tensor([[8.0, 8, 40, 50]])), torch.tensor([1])
    shown.gt_masks = BitMasks(torch.ones(1, 64, 64, dtype=torch.bool))
    for name in DETECTRON2:
        cfg = train["load"](str(tmp_path / "out" / "configs" / f"{name}.yaml"))
        if name.startswith("fcos"):
            model, weights = instantiate(cfg.model), cfg.train.init_checkpoint
        else:
            cfg.MODEL.DEVICE = "cpu"
            model, weights = build_model(cfg), cfg.MODEL.WEIGHTS
        DetectionCheckpointer(model).load(weights)
        c4 = name == "voc_c4_24k"
        bottom = model.backbone if c4 else model.backbone.bottom_up
        assert torch.equal(bottom.stem.conv1.weight, state["conv1.weight"])
        last = model.roi_heads.res5[2] if c4 else bottom.res5[2]
        assert torch.equal(last.conv3.weight, state["layer4.2.conv3.weight"])
        norms = [m for m in model.backbone.modules() if hasattr(m, "running_mean")]
        assert {type(m) for m in norms} == {torch.nn.SyncBatchNorm}
        image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
        with EventStorage():
            losses = model.train()([{"image": image, "instances": shown, "height": 64, "width": 64}])
        sum(losses.values()).backward()
        assert all(p.grad is not None for p in bottom.parameters()), name
        assert all(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore")  # of detectron2's own making
def test_detectron2_takes_the_printed_lines(run: Path, tmp_path: Path):
    pytest.importorskip("detectron2")
    from detectron2.checkpoint import DetectionCheckpointer
    from detectron2.modeling import build_backbone

    cfg = loaded_by(export(run, "detectron2", tmp_path / "out"))["cfg"]
    backbone = build_backbone(cfg).bottom_up
    DetectionCheckpointer(backbone).load(cfg.MODEL.WEIGHTS)
    for name, tensor in renamed(load_encoder(run).encoder.state_dict()).items():
        assert torch.equal(backbone.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("format", "network", "says"),
    [
        ("torchvision", ("resnet18", "small", 1.0), "torchvision has no resnet18 with the 3x3 stem small"),
        ("torchvision", ("resnet10", "imagenet", 1.0), "torchvision has no resnet10. Export to onnx"),
        ("detectron2", ("resnet10", "imagenet", 1.0), "detectron2 has no resnet10. Export to onnx"),
        ("torchvision", ("resnet18", "imagenet", 0.25), "torchvision has no resnet18 of width 0.25"),
        (
            "torchvision",
            ("resnet18", "small", 0.25),
            "stem small and of width 0.25. Export to onnx, or pretrain with model.stem imagenet and model.width 1.",
        ),
        ("timm", ("resnet18", "cifar", 1.0), "timm has no resnet18 with the 3x3 stem cifar"),
        ("timm", ("mnasnet0_5", "imagenet", 1.0), "timm takes ResNets"),
        ("torchvision", ("timm/test_vit", "imagenet", 1.0), "torchvision does not have timm/test_vit"),
        (
            "detectron2",
            ("timm/test_vit", "imagenet", 1.0),
            "detectron2 takes ResNets, not timm/test_vit. Export to timm or onnx",
        ),
        ("huggingface", ("resnet18", "imagenet", 0.5), "timm has no resnet18 of width 0.5"),
        ("detectron2", ("resnet18", "imagenet", 0.5), "detectron2 has no resnet18 of width 0.5"),
        ("detectron2", ("mnasnet0_5", "imagenet", 1.0), "detectron2 takes ResNets"),
    ],
)
def test_what_a_target_cannot_express_is_refused(tmp_path: Path, format: str, network, says: str):
    source = saved(tmp_path, *network, perturbed=False)
    with pytest.raises(UserError, match=re.escape(says)):
        export(source, format, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def test_vgg_is_refused_by_torchvision():
    card = EncoderCard.of_foreign(Architecture("vgg11_bn", "imagenet", 1.0), 512)
    with pytest.raises(UserError, match="gives different features"):
        FORMATS["torchvision"].check(card)


def test_bottlenecks_of_any_width_go_to_detectron2(tmp_path: Path):
    export(saved(tmp_path, "resnet50", width=0.25, perturbed=False), "detectron2", tmp_path / "out")
    settings = yaml.safe_load((tmp_path / "out" / "detectron2.yaml").read_text())["MODEL"]["RESNETS"]
    arrays = torch.load(tmp_path / "out" / "model.pth", weights_only=True)["model"]
    assert len(arrays["stem.conv1.weight"]) == settings["STEM_OUT_CHANNELS"] == 16
    assert len(arrays["res2.0.conv2.weight"]) == settings["WIDTH_PER_GROUP"] == 16
    assert len(arrays["res2.0.conv3.weight"]) == settings["RES2_OUT_CHANNELS"] == 64
