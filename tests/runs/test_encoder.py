"""Encoders from runs, checkpoints and files: the right tensors, or one sentence."""

import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import momentum2
from momentum2 import backbones
from momentum2._torchvision import torchvision
from momentum2.api import pretrain
from momentum2.augment import render
from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    Network,
    TrainConfig,
    ViewsConfig,
)
from momentum2.data import iterate, open_dataset
from momentum2.errors import UserError
from momentum2.methods import Method
from momentum2.runs.card import EncoderCard, read_card
from momentum2.runs.directory import open_run
from momentum2.runs.encoder import ENCODER, load_encoder, save_encoder
from momentum2.runs.state import collect
from momentum2.training.build import build_method
from momentum2.training.plan import resolve
from momentum2.weights import RESNETS, Architecture, identify, network_in

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def config_of(method: str) -> Config:
    return Config(
        method=MethodConfig(name=method, queue_size=16),
        model=ModelConfig("resnet18", "small", 0.125, projector_hidden=8, projector_out=4),
        data=DataConfig("shapes", image_size=32),
        views=ViewsConfig("supervised" if method == "supervised" else "byol"),
        train=TrainConfig(steps=9, batch_size=4),
    )


def make_run(out: Path, config: Config, steps: tuple[int, ...] = (3,)) -> Method:
    """A run directory with checkpoints of a method whose every tensor is random; returns the method."""
    method = build_method(config, resolve(config, 100), classes=3)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1)
    with open_run(out, config, "auto") as run:
        run.begin()
        for step in steps:
            for name, tensor in method.state_dict().items():
                if name.endswith("running_var"):
                    tensor.uniform_(0.5, 2)
                elif tensor.is_floating_point():
                    tensor.normal_(std=0.3)
            run.checkpoints.save(step, *collect(method, optimizer), {})
    return method


@torch.no_grad()
def features(network: nn.Module, images: Tensor = IMAGES) -> Tensor:
    return network.eval()(images)


@pytest.mark.parametrize("name", ["byol", "moco", "simsiam", "simclr", "dino", "supervised"])
def test_every_method_gives_its_encoders(tmp_path: Path, name: str):
    method = make_run(tmp_path / "run", config_of(name))
    encoders = method.encoders()
    loaded = load_encoder(tmp_path / "run")
    first = next(iter(encoders))
    assert loaded.card.network == first
    assert (loaded.card.method, loaded.card.step, loaded.card.data) == (name, 3, "shapes")
    assert not loaded.training
    for network, encoder in encoders.items():
        loaded = load_encoder(tmp_path / "run", network)
        assert loaded.feature_dim == 64
        torch.testing.assert_close(loaded(IMAGES), features(encoder), atol=1e-6, rtol=1e-5)
    if first == "student":
        with pytest.raises(UserError, match=f"method {name} has none"):
            load_encoder(tmp_path / "run", "teacher")


@pytest.mark.parametrize("name", ["byol", "moco", "dino"])
@pytest.mark.parametrize("export", ["teacher", "student", None])
def test_a_run_says_which_of_its_encoders_is_meant(tmp_path: Path, name: str, export: Network | None):
    config = config_of(name)
    config = replace(config, method=replace(config.method, export=export))
    method = make_run(tmp_path / "run", config)
    networks = {"teacher": method.teacher.network, "student": method.student}
    expected = export or "teacher"
    assert list(method.encoders()) == [expected, *(n for n in networks if n != expected)]
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000003"
    for source in (tmp_path / "run", checkpoint):
        loaded = load_encoder(source)
        assert loaded.card.network == expected
        torch.testing.assert_close(loaded(IMAGES), features(networks[expected].encoder), atol=1e-6, rtol=1e-5)
        for network in networks:
            asked = load_encoder(source, network)
            assert asked.card.network == network
            torch.testing.assert_close(
                asked(IMAGES), features(networks[network].encoder), atol=1e-6, rtol=1e-5
            )


def test_a_run_exports_and_scores_the_encoder_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = replace(config_of("byol"), train=TrainConfig(steps=2, batch_size=8, threads=1, precision="fp32"))
    config = replace(
        config,
        method=replace(config.method, export="student", weight_momentum=0.1),
        data=replace(config.data, train_size=16, cache="off"),
        monitor=MonitorConfig(knn_every=1, report=False),
    )
    scored: list[dict[Network, nn.Module]] = []

    def score(encoders: dict[Network, nn.Module], done: int) -> dict[str, float]:
        scored.append(encoders)
        return {"knn_top1": 0.0}

    monkeypatch.setattr("momentum2.api.online_knn", lambda *_: score)
    assert pretrain(config, tmp_path).finished
    card = read_card(tmp_path / ENCODER)
    assert card is not None
    assert card.network == "student"
    assert list(scored[-1]) == ["student", "teacher"]
    exported = load_file(tmp_path / ENCODER)
    checkpoint = load_file(tmp_path / "checkpoints" / "step-00000002" / "shared.safetensors")
    assert torch.equal(exported["conv1.weight"], checkpoint["method/student.encoder.conv1.weight"])
    assert not torch.equal(
        exported["conv1.weight"], checkpoint["method/teacher.network.encoder.conv1.weight"]
    )


@pytest.mark.parametrize("name", ["simsiam", "simclr", "supervised"])
def test_a_method_without_a_teacher_cannot_export_one(tmp_path: Path, name: str):
    config = config_of(name)
    for export in ("student", None):
        resolve(replace(config, method=replace(config.method, export=export)), 100)
    with pytest.raises(UserError, match=r"method\.export cannot be teacher"):
        pretrain(replace(config, method=replace(config.method, export="teacher")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_gives_its_encoder_file_and_its_checkpoints(tmp_path: Path):
    run = tmp_path / "run"
    method = make_run(run, config_of("byol"), steps=(3, 6))
    teacher, student = method.encoders().values()
    save_encoder(run / ENCODER, teacher, EncoderCard.of_run(config_of("byol"), 64, "teacher", 9))
    for source in (run, str(run), run / ENCODER):
        loaded = momentum2.load_encoder(source)
        assert loaded.card.step == 9
        torch.testing.assert_close(loaded(IMAGES), features(teacher), atol=1e-6, rtol=1e-5)
    assert load_encoder(run, "student").card.step == 6  # only checkpoints have it
    torch.testing.assert_close(load_encoder(run, "student")(IMAGES), features(student), atol=1e-6, rtol=1e-5)
    assert load_encoder(run / "checkpoints" / "step-00000003").card.step == 3
    with pytest.raises(UserError, match="contains the teacher, not the student"):
        load_encoder(run / ENCODER, "student")


def test_damaged_checkpoints_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    make_run(tmp_path, config_of("simclr"), steps=(3, 6))
    flip(tmp_path / "checkpoints" / "step-00000006" / "shared.safetensors")
    with caplog.at_level(logging.WARNING):
        assert load_encoder(tmp_path).card.step == 3
    assert "step-00000006 is corrupt" in caplog.text
    with pytest.raises(UserError, match="step-00000006 is corrupt"):
        load_encoder(tmp_path / "checkpoints" / "step-00000006")
    flip(tmp_path / "checkpoints" / "step-00000003" / "devices.safetensors")
    with pytest.raises(UserError, match="no intact checkpoint"):
        load_encoder(tmp_path)


def flip(path: Path) -> None:
    """Change one bit in the last tensor."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def small() -> backbones.Encoder:
    """A network with statistics that are not the initial ones."""
    torch.manual_seed(0)
    encoder = backbones.build("resnet18", "imagenet", 0.25)
    encoder(torch.randn(4, 3, 64, 64))
    return encoder


CARD = EncoderCard(
    *("resnet18", "imagenet", 0.25, 128, 32),
    (0.1, 0.2, 0.3),
    (0.4, 0.5, 0.6),
    0.75,
    network="student",
    step=7,
)


def test_the_card_travels_with_the_file(tmp_path: Path, small: nn.Module):
    save_encoder(tmp_path / ENCODER, small, CARD)
    assert read_card(tmp_path / ENCODER) == CARD
    assert load_file(tmp_path / ENCODER).keys() == small.state_dict().keys()
    assert [path.name for path in tmp_path.iterdir()] == [ENCODER]  # nothing temporary is left
    save_encoder(tmp_path / ENCODER, small, replace(CARD, step=8))
    assert load_encoder(tmp_path / ENCODER).card.step == 8
    with pytest.raises(UserError, match=r"has width 0\.25, not 1"):
        load_encoder(tmp_path / ENCODER, width=1)
    with pytest.raises(UserError, match="has backbone resnet18, not resnet50"):
        load_encoder(tmp_path / ENCODER, backbone="resnet50")
    with pytest.raises(UserError, match="cannot be written"):
        save_encoder(tmp_path / "nowhere" / ENCODER, small, CARD)


def test_a_momentum_teacher_is_saved_as_plain_batch_norm(tmp_path: Path, small: nn.Module):
    teacher = momentum2.MomentumTeacher(small)
    save_encoder(tmp_path / ENCODER, teacher.network, CARD)
    torch.testing.assert_close(load_encoder(tmp_path / ENCODER)(IMAGES), features(small))


def test_damage_is_noticed(tmp_path: Path, small: nn.Module):
    path = tmp_path / ENCODER
    save_encoder(path, small, CARD)
    whole = path.read_bytes()
    flip(path)
    with pytest.raises(UserError, match="corrupt: its tensors are not those that were written"):
        load_encoder(path)
    for part in (b"", whole[:-1], whole[: len(whole) // 2], whole[:5], b"hello"):
        path.write_bytes(part)
        with pytest.raises(UserError, match="corrupt or is not a safetensors file"):
            load_encoder(path)
    state = load_file_from(whole, tmp_path)
    save_file(state, path, {"momentum2": "{}"})
    with pytest.raises(UserError, match="another version"):
        load_encoder(path)


def load_file_from(data: bytes, folder: Path) -> dict[str, Tensor]:
    (folder / "copy.safetensors").write_bytes(data)
    return load_file(folder / "copy.safetensors")


WRAPPED = {
    "plain": lambda s: s,
    "ddp": lambda s: {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in s.items()}},
    "moco": lambda s: {
        "state_dict": {f"module.encoder_q.{k}": v for k, v in s.items()}
        | {f"module.encoder_k.{k}": torch.zeros_like(v) for k, v in s.items()}
        | {"module.queue": torch.zeros(4, 4)}
    },
    "backbone": lambda s: {
        "model": {f"backbone.{k}": v for k, v in s.items()} | {"head.weight": torch.zeros(3)}
    },
    "compiled": lambda s: {f"_orig_mod.encoder.{k}": v for k, v in s.items()},
    "with a classifier": lambda s: s | {"fc.weight": torch.zeros(10, 128), "fc.bias": torch.zeros(10)},
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_state_dicts_of_others(tmp_path: Path, small: nn.Module, wrap: str):
    torch.save(WRAPPED[wrap](dict(small.state_dict())), tmp_path / "model.pth")
    loaded = load_encoder(tmp_path / "model.pth")
    assert loaded.card.architecture == Architecture("resnet18", "imagenet", 0.25)
    assert (loaded.card.network, loaded.card.image_size) == (None, 224)
    assert torch.equal(loaded(IMAGES), features(small))


def test_half_precision_files_load_as_float32(tmp_path: Path, small: nn.Module):
    state = {k: v.half() if v.is_floating_point() else v for k, v in small.state_dict().items()}
    save_file(state, tmp_path / "half.safetensors")
    loaded = load_encoder(tmp_path / "half.safetensors")
    assert loaded(IMAGES).dtype == torch.float32
    assert torch.equal(loaded.encoder.state_dict()["conv1.weight"].half(), state["conv1.weight"])


@pytest.mark.parametrize("name", RESNETS)
def test_resnets_are_recognized(name: str):
    with torch.device("meta"):
        state = torchvision.models.get_model(name, weights=None).state_dict()
    network = network_in(state, ["conv1.weight"], Path("file"))
    assert identify(network, Path("file"), None, None, None) == Architecture(name, "imagenet", 1.0)


def test_stems_that_look_alike_have_to_be_named(tmp_path: Path):
    encoder = backbones.build("resnet18", "cifar", 0.125)
    torch.save(encoder.state_dict(), tmp_path / "cifar.pth")
    with pytest.raises(UserError, match="Set stem to cifar or small"):
        load_encoder(tmp_path / "cifar.pth")
    loaded = load_encoder(tmp_path / "cifar.pth", stem="cifar")
    assert torch.equal(loaded(IMAGES), features(encoder))


def test_other_networks_have_to_be_named(tmp_path: Path):
    encoder = backbones.build("mnasnet0_5")
    torch.save(encoder.state_dict(), tmp_path / "model.pth")
    with pytest.raises(UserError, match="Set backbone to the one"):
        load_encoder(tmp_path / "model.pth")
    assert load_encoder(tmp_path / "model.pth", backbone="mnasnet0_5").feature_dim == 1280


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (lambda s: {k: v for k, v in s.items() if k != "bn1.weight"}, {}, "1 missing (bn1.weight)"),
        (lambda s: s | {"surplus": torch.zeros(1)}, {}, "1 unknown (surplus)"),
        (lambda s: s, {"backbone": "resnet34"}, "missing (layer1.2.bn1.bias"),
        (lambda s: s, {"backbone": "resnet20"}, "torchvision has no backbone 'resnet20'"),
        (lambda s: s, {"width": 0.5}, "of a different shape"),
        (lambda s: {f"strange.{k}": v for k, v in s.items()}, {}, "does not contain a ResNet"),
        (
            lambda s: {f"{p}.{k}": v for k, v in s.items() for p in ("encoder", "module")},
            {},
            "several networks",
        ),
        (
            lambda s: {k: v for k, v in s.items() if "layer4.1" not in k},
            {},
            "does not contain a ResNet of torchvision",
        ),
        (lambda s: {"epoch": 3}, {}, "no state dict"),
        (lambda s: [1, 2], {}, "no state dict"),
        (lambda s: Path("a"), {}, "not a readable state dict"),
    ],
)
def test_wrong_files_are_one_sentence(tmp_path: Path, small: nn.Module, content, options, says: str):
    torch.save(content(dict(small.state_dict())), tmp_path / "model.pth")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        load_encoder(tmp_path / "model.pth", **options)
    assert str(caught.value).endswith((".", "?"))
    assert "\n" not in str(caught.value)


def test_wrong_places_are_one_sentence(tmp_path: Path):
    with pytest.raises(UserError, match="no run directory or file"):
        load_encoder(tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run directory or a checkpoint"):
        load_encoder(tmp_path)
    (tmp_path / "config.yaml").write_text("method: {}\n")
    with pytest.raises(UserError, match=r"no encoder\.safetensors and no intact checkpoint"):
        load_encoder(tmp_path)


def test_preprocessing_is_crop_resize_normalize(tmp_path: Path, small: nn.Module):
    save_encoder(tmp_path / ENCODER, small, CARD)
    preprocess = load_encoder(tmp_path / ENCODER).preprocess
    y, x = np.mgrid[:80, :120]
    pixels = np.stack([x * 2, y * 3, (x + y)], 2).astype(np.uint8)
    image = Image.fromarray(pixels)
    # CARD: the central square of 0.75 x the shorter side, 60 pixels, at 32 pixels
    crop = image.resize((32, 32), Image.Resampling.BILINEAR, box=(30, 10, 90, 70))
    expected = (np.asarray(crop) / 255 - [0.1, 0.2, 0.3]) / [0.4, 0.5, 0.6]
    one = preprocess(image)
    assert one.shape == (3, 32, 32)
    np.testing.assert_allclose(one.permute(1, 2, 0).numpy(), expected, atol=0.011)  # one gray level
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    for same in (pixels, tensor):
        assert torch.equal(preprocess(same), one)
    for several in ([image, pixels], np.stack([pixels, pixels]), torch.stack([tensor, tensor])):
        assert torch.equal(preprocess(several), torch.stack([one, one]))
    assert preprocess(image.convert("L")).shape == (3, 32, 32)
    for wrong in (pixels / 255.0, pixels[:, :, :2], tensor.float(), "an image.png"):
        with pytest.raises(UserError, match="An image must be a PIL image"):
            preprocess(wrong)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_preprocessing_is_what_evaluations_see(tmp_path: Path, small: nn.Module, mode: str):
    save_encoder(tmp_path / ENCODER, small, CARD)
    loaded = load_encoder(tmp_path / ENCODER)
    noise = np.random.default_rng(0).integers(0, 256, (70, 90, 4), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    (tmp_path / "photos").mkdir()
    Image.fromarray(noise).convert(mode).save(tmp_path / "photos" / "0.png", exif=exif)
    dataset = open_dataset(DataConfig("folder", str(tmp_path / "photos"), cache="off"))
    (batch,) = iterate(dataset, loaded.card.view, batch_size=1)
    (expected,) = render(batch.images, batch.draws, (loaded.card.view,))
    with Image.open(tmp_path / "photos" / "0.png") as image:
        torch.testing.assert_close(loaded.preprocess([image]), expected, atol=0.011, rtol=0)  # one gray level


def test_the_package_has_no_other_lazy_names():
    with pytest.raises(AttributeError, match="load_encoders"):
        momentum2.load_encoders  # noqa: B018


def test_a_file_of_weights_is_the_same_bytes_in_every_process():
    """safetensors orders metadata by a hash with another seed in each process."""
    program = (
        "import sys, torch; from momentum2.weights import to_bytes; "
        "sys.stdout.buffer.write(to_bytes({'b': torch.arange(3.0), 'a': torch.ones(2, 2)}, "
        "{str(i): 'ü' * i for i in range(8)}))"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        for _ in range(2)
    )
    assert first == second
    assert torch.equal(safetensors.torch.load(first)["a"], torch.ones(2, 2))
    assert torch.equal(safetensors.torch.load(first)["b"], torch.arange(3.0))
