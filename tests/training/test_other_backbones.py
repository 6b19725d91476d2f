"""Networks of other families from the first step to the exported folder, and weights that others have published."""

import json
import logging
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import momentum2
from momentum2 import backbones, recipes
from momentum2.api import evaluate_knn, plan, pretrain
from momentum2.backbones import published
from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)
from momentum2.errors import SettingError, UserError
from momentum2.evaluate.knn import KnnOptions
from momentum2.evaluate.subject import SubjectOptions
from momentum2.methods.method import Method
from momentum2.runs.card import inspect
from momentum2.runs.encoder import load_encoder
from momentum2.settings import flatten, override
from momentum2.training.alarms import Alarms
from momentum2.training.build import build_method
from momentum2.training.checks import check_encoder
from momentum2.training.plan import resolve
from momentum2.training.start import starting_weights
from momentum2.weights import Architecture

DATA = DataConfig("shapes", image_size=32, train_size=48, cache="off")
ADAMW = OptimConfig(
    "adamw", lr=0.01, weight_decay=0.04, weight_decay_end=0.4, exclude_bias_and_norm=True, layer_decay=0.8
)


def config_of(backbone: str, **sections: Any) -> Config:
    base = Config(
        model=ModelConfig(backbone, projector_hidden=16, projector_out=8),
        data=DATA,
        train=TrainConfig(steps=4, batch_size=8, threads=1, checkpoint_every=2, keep=9),
        optim=ADAMW,
        monitor=MonitorConfig(log_every=1, report=False),
    )
    return replace(base, **sections)


def tensors(run: Path) -> dict[str, bytes]:
    last = sorted((run / "checkpoints").iterdir())[-1]
    return {name: (last / name).read_bytes() for name in ("shared.safetensors", "devices.safetensors")}


@pytest.mark.parametrize("name", ["test_convnext", "test_efficientnet", "test_vit"])
def test_a_run_that_is_killed_ends_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(f"timm/{name}")
    if name != "test_efficientnet":
        config = replace(
            config,
            model=replace(config.model, options=["drop_path_rate=0.2"]),
            optim=replace(ADAMW, freeze_encoder_epochs=1 / 6, encoder_lr=0.5),  # one step
        )
    assert pretrain(config, tmp_path / "whole").finished

    class Killed(BaseException):
        pass

    def begin(self: Method, k: int, begin: Any = Method.before_step) -> None:
        if k == 3:
            raise Killed
        begin(self, k)

    with monkeypatch.context() as patch:
        patch.setattr(Method, "before_step", begin)
        with pytest.raises(Killed):
            pretrain(config, tmp_path / "killed")
    assert len(list((tmp_path / "killed" / "checkpoints").iterdir())) == 1
    assert pretrain(config, tmp_path / "killed", resume="must").finished
    assert tensors(tmp_path / "killed") == tensors(tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "checkpoints" / "step-00000004" / "shared.safetensors")
    steps = {name.split("/")[1]: t.item() for name, t in state.items() if name.endswith("/step")}
    held = {place for place in steps if place.startswith("student.encoder.")}
    assert {steps[place] for place in held} == {4.0 if name == "test_efficientnet" else 3.0}
    assert {steps[place] for place in steps.keys() - held} == {4.0}

    encoder = load_encoder(tmp_path / "whole")
    assert encoder.card.backbone == f"timm/{name}"
    result = evaluate_knn(
        tmp_path / "whole",
        subject=SubjectOptions(replace(DATA, split="train", test_split="train")),
        options=KnnOptions(k=1),
    )
    assert set(result.floors) == {"random initialization", "raw pixels", "whitened patches"}


def test_stochastic_depth_is_the_students_alone() -> None:
    config = config_of("timm/test_vit")
    config = replace(config, model=replace(config.model, options=["drop_path_rate=0.9"]))
    method = build_method(config, resolve(config, 48), 0).train()
    x = torch.randn(4, 3, 32, 32)
    student, teacher = method.student, method.teacher  # type: ignore[union-attr]
    assert not torch.equal(student(x), student(x))
    assert torch.equal(teacher(x), teacher(x))


@pytest.mark.parametrize(
    "method", [MethodConfig("moco", queue_size=16), MethodConfig("dino"), MethodConfig("simsiam")]
)
def test_methods_take_encoders_without_batch_norm(method: MethodConfig, tmp_path: Path) -> None:
    views = ViewsConfig("multicrop", small_crops=1, small_size=16) if method.name == "dino" else ViewsConfig()
    config = config_of("timm/vit_tiny_patch16_224", method=method, views=views)
    config = replace(
        config,
        model=replace(config.model, options=["depth=1", "patch_size=8"]),
        train=replace(config.train, steps=1),
    )
    assert pretrain(config, tmp_path / "run").finished
    small = ("dynamic_img_size=true",) if method.name == "dino" else ()
    assert load_encoder(tmp_path / "run").card.options == ("depth=1", "patch_size=8", "img_size=32", *small)


def test_recomputation_changes_no_bit(tmp_path: Path) -> None:
    config = config_of("timm/test_vit")
    config = replace(config, model=replace(config.model, options=["drop_path_rate=0.2"]))
    found = []
    for recompute in (False, True):
        now = replace(config, train=replace(config.train, steps=2, recompute=recompute))
        assert pretrain(now, tmp_path / str(recompute)).finished
        found.append(tensors(tmp_path / str(recompute)))
    assert found[0] == found[1]
    trains = [replace(config.train, recompute=recompute) for recompute in (False, True)]
    memory = [dict(plan(replace(config, train=train), images=48))["memory"] for train in trains]
    activations = [float(line.partition("optimizer, ")[2].split()[0]) for line in memory]
    assert activations[1] < activations[0]


@pytest.mark.parametrize(
    ("backbone", "sections", "message"),
    [
        ("timm/test_resnet", {"train": TrainConfig(recompute=True)}, "^train.recompute would count"),
        (
            "convnext_tiny",
            {"train": TrainConfig(recompute=True)},
            "^train.recompute does not work with convnext_tiny",
        ),
        ("resnet18", {"optim": OptimConfig(layer_decay=0.5)}, "^optim.layer_decay is only for timm networks"),
        (
            "resnet18",
            {"model": ModelConfig("resnet18", pretrained=True)},
            "^model.pretrained is only for timm networks",
        ),
        (
            "timm/test_vit",
            {"model": ModelConfig("timm/test_vit", pretrained=True, weights="x")},
            "cannot both be set",
        ),
        (
            "timm/vit_tiny_patch16_224",
            {"data": replace(DATA, image_size=8)},
            "^data.image_size 8 does not work with",
        ),
    ],
)
def test_what_does_not_suit_a_network_is_said_before_anything_is_written(
    backbone: str, sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=message):
        pretrain(config_of(backbone, **{"optim": OptimConfig(), **sections}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub, as `hf_hub_download` leaves it, with what timm would have published of test_vit."""
    import timm
    from huggingface_hub import constants

    torch.manual_seed(3)
    network = timm.create_model("test_vit", num_classes=1000)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--timm--test_vit.r160_in1k"
    file = place / "snapshots" / "0123abcd" / published.FILE
    file.parent.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123abcd")
    save_file(network.state_dict(), file)
    return file


def test_published_weights_are_read_once_and_recorded(
    hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "momentum2")
    config = config_of("timm/test_vit", eval_data=replace(DATA, test_split="train"))
    config = replace(
        config,
        model=replace(config.model, pretrained=True, options=["img_size=32"]),
        optim=replace(ADAMW, lr=10.0),  # it will be the worse for it
        train=replace(config.train, steps=4, batch_size=24),
        monitor=replace(config.monitor, knn_every=1, knn_k=1),
    )
    run = tmp_path / "run"
    assert pretrain(config, run).finished
    digest = published.sha256(hub)
    assert "timm/test_vit.r160_in1k in" in caplog.text
    assert "license apache-2.0" in caplog.text
    assert "By timm's rules, pos_embed is fitted from [1, " in caplog.text
    assert f"license apache-2.0, SHA-256 {digest}" in (run / "plan.txt").read_text()
    card = load_encoder(run).card
    assert card.start == {"name": "timm/test_vit.r160_in1k", "license": "apache-2.0", "sha256": digest}
    assert load_encoder(sorted((run / "checkpoints").iterdir())[0]).card.start == card.start

    # The encoder before the first step is the published one, its positions for another size, and a floor of its own.
    begun, theirs = load_encoder(run / "start.safetensors").encoder.state_dict(), load_file(hub)
    same = {
        name for name in begun if begun[name].shape == theirs[name].shape and begun[name].equal(theirs[name])
    }
    assert begun.keys() - same == {"pos_embed"}
    result = evaluate_knn(run, options=KnnOptions(k=1))
    assert set(result.floors) == {
        "starting weights",
        "random initialization",
        "raw pixels",
        "whitened patches",
    }
    online = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "knn_top1" in line
    ]
    assert online[0]["step"] == 0
    assert online[0]["knn_top1"] == online[0]["floor_start"]

    # Afterwards nobody needs the file, and another one under its name is noticed.
    (run / "encoder.safetensors").unlink()
    save_file({"other": torch.zeros(1)}, hub)
    caplog.clear()
    assert pretrain(config, run).finished
    assert f"is not what this run started from (SHA-256 {digest})" in caplog.text
    hub.unlink()
    assert pretrain(config, run).finished
    assert load_encoder(run).card == card


def test_published_weights_fit_channels_patches_and_positions(hub: Path) -> None:
    theirs = load_file(hub)
    for channels in (1, 3, 13):
        network, told = published.load(
            Architecture("timm/test_vit", "imagenet", 1.0, ("img_size=32",), channels), hub
        )
        weight, old = network.state_dict()["patch_embed.proj.weight"], theirs["patch_embed.proj.weight"]
        if channels == 1:
            torch.testing.assert_close(weight, old.sum(1, keepdim=True))
        elif channels == 13:
            torch.testing.assert_close(weight, old.repeat(1, 5, 1, 1)[:, :13] * 3 / 13)
        else:
            assert torch.equal(weight, old)
        assert any(sentence.startswith("pos_embed is fitted") for sentence in told)
        assert any(sentence.startswith("patch_embed.proj.weight") for sentence in told) == (channels != 3)


def test_a_file_without_all_weights_is_refused(hub: Path) -> None:
    state = load_file(hub)
    del state["blocks.0.attn.qkv.weight"]
    save_file(state, hub)
    with pytest.raises(UserError, match=r"do not fit timm/test_vit: blocks.0.attn.qkv.weight is missing"):
        published.load(Architecture("timm/test_vit", "imagenet", 1.0), hub)


def test_a_hub_that_cannot_be_reached_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"timm/test_vit.r160_in1k cannot be fetched from huggingface.co \("):
        published.fetch("timm/test_vit")
    with pytest.raises(SettingError, match="there are no published weights for timm/coatnet_0_224"):
        published.fetch("timm/coatnet_0_224")


def test_adapting_that_lowers_knn_is_an_alarm() -> None:
    alarms = Alarms(MonitorConfig())
    assert alarms.check_start(10, {"knn_top1": 30.0, "knn_interval": 1.0}) == []
    assert alarms.check_start(10, {"knn_top1": 39.5, "knn_interval": 1.0, "floor_start": 40.0}) == []
    (sentence,) = alarms.check_start(20, {"knn_top1": 30.0, "knn_interval": 1.0, "floor_start": 40.0})
    assert "adapting lowered kNN from 40.0% to 30.0%" in sentence
    assert alarms.check_start(30, {"knn_top1": 20.0, "knn_interval": 1.0, "floor_start": 40.0}) == []


def photos(folder: Path, count: int = 24) -> Path:
    rng = np.random.default_rng(0)
    for i in range(count):
        place = folder / ("a", "b")[i % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(place / f"{i}.png")
    return folder


def test_on_a_cpu_the_short_recipes_are_simclr_and_the_teacher_is_one_setting_away(tmp_path: Path) -> None:
    given = {"data.root": str(photos(tmp_path / "photos")), "train.device": "cpu"}
    teacher = recipes.find("cifar10-cpu").config.method
    assert (teacher.name, teacher.repulsion, teacher.predictor) == ("byol", "batch", False)
    for name, own in (("quickstart", {}), ("folder", given)):
        recipe = recipes.find(name)
        assert recipes.configure(recipe, own).method == replace(teacher, name="simclr")
        assert recipes.configure(recipe, own | {"method.name": "byol"}).method == teacher
    # A GPU runs folder for long, where nothing speaks against the teacher.
    assert recipes.find("folder").config.method == teacher


def test_methods_that_take_two_views_get_two_of_twice_the_images(tmp_path: Path) -> None:
    def chosen(name: str, own: dict[str, object]) -> tuple[object, ...]:
        config = recipes.configure(recipes.find(name), own)
        train = config.train
        return config.views.repeat, train.batch_size, train.epochs, pytest.approx(config.optim.lr)

    def in_steps(own: dict[str, object]) -> tuple[object, ...]:
        config = recipes.configure(recipes.find("quickstart"), own)
        epoch = 20_000 // config.train.batch_size
        rate = config.optim.lr * config.train.batch_size / 256
        return (
            config.train.epochs * epoch,
            round(config.optim.warmup_epochs * epoch),
            config.monitor.knn_every * epoch,
            pytest.approx(rate),
        )

    for own in ({}, {"method.name": "simclr"}, {"method.name": "byol"}, {"method.name": "dino"}):
        assert chosen("quickstart", own) == (2, 64, 2, 0.16)
    pairs = (
        {"method.name": "moco"},
        {"method.name": "simsiam"},
        {"views.repeat": 1},
        {"views.recipe": "supervised"},
    )
    for own in pairs:
        assert chosen("quickstart", own) == (1, 128, 4, 0.08)
        assert in_steps(own) == in_steps({}) == (624, 31, 312, 0.04)
    moco = {"method.name": "moco"}
    assert chosen("quickstart", moco | {"train.batch_size": 128}) == chosen("quickstart", moco)
    assert chosen("quickstart", moco | {"train.batch_size": 32}) == (1, 32, 4, 0.08)
    assert chosen("quickstart", moco | {"optim.lr": 0.16, "train.epochs": 3}) == (1, 128, 3, 0.16)
    given = {"data.root": str(photos(tmp_path / "photos", 256)), "train.device": "cpu", "train.epochs": 5}
    for own in ({}, {"method.name": "simclr"}, {"method.name": "byol"}):
        assert chosen("folder", given | own) == (2, 64, 5, 0.16)
    for own in ({"method.name": "moco"}, {"views.repeat": 1}):
        assert chosen("folder", given | own) == (1, 128, 5, 0.08)
    for repeat, batch in ((3, 32), (64, 2), (100, 2)):
        assert chosen("folder", given | {"views.repeat": repeat})[:2] == (repeat, batch)
    adapt = {key: value for key, value in given.items() if key != "train.epochs"} | {
        "model.backbone": "timm/test_vit"
    }
    assert chosen("adapt", adapt)[:3] == (1, 128, 20)  # the paper's loss, for two views


def test_a_whole_config_of_an_older_version_is_not_filled_up_by_a_recipe(tmp_path: Path) -> None:
    """What it lacks is as it was before there was such a setting."""
    whole = flatten(asdict(override(Config(), {"method.name": "simclr", "train.batch_size": 128})))
    del whole["views.repeat"]
    for name in ("quickstart", "folder"):
        config = recipes.configure(recipes.find(name), {**whole, "data.root": str(tmp_path), "optim.lr": 0.3})
        assert (config.views.repeat, config.train.batch_size, config.optim.lr) == (1, 128, 0.3)
    # A few of one's own in every section are not a whole config.
    few = {
        name: value for name, value in whole.items() if name.endswith((".name", ".recipe", ".width", ".seed"))
    }
    few |= {"monitor.knn_every": 1, "optim.lr": 0.1, "eval_data.name": "none"}
    assert recipes.configure(recipes.find("quickstart"), few).model.backbone == "resnet10"


def test_weight_decay_takes_as_much_off_in_runs_of_any_length(tmp_path: Path) -> None:
    """The sum of rate × decay over all steps, at its peak rate, is that of the quickstart."""
    config = recipes.find("quickstart").config
    quickstart, batch = config.optim, config.train.batch_size
    total = quickstart.weight_decay * quickstart.lr * batch / 256 * config.train.epochs * (20_000 // batch)
    given = {"data.root": str(photos(tmp_path / "photos", 64)), "train.device": "cpu"}
    for own in ({}, {"train.epochs": 300}, {"train.steps": 1000}, {"train.epochs": 300, "optim.lr": 0.2}):
        config = recipes.configure(recipes.find("folder"), given | own)
        steps = config.train.steps or config.train.epochs * (64 // config.train.batch_size)
        rate = config.optim.lr * config.train.batch_size / 256
        assert config.optim.weight_decay * rate * steps == pytest.approx(total, rel=0.01)
    for own in ({"train.steps": 1}, {"optim.lr": 0.0}):  # where it would take off more than there is
        assert recipes.configure(recipes.find("folder"), given | own).optim.weight_decay == 0.2
    cifar = recipes.find("cifar10-cpu").config
    steps = cifar.train.epochs * (50_000 // cifar.train.batch_size)
    rate = cifar.optim.lr * cifar.train.batch_size / 256
    assert cifar.optim.weight_decay * rate * steps == pytest.approx(total, rel=0.01)
    own = recipes.configure(recipes.find("folder"), given | {"optim.weight_decay": 0.5})
    assert own.optim.weight_decay == 0.5
    # sgd adds it to the gradient, where 0.1 would be far too much.
    for name, decay in (("sgd", 1e-4), ("adamw", quickstart.weight_decay)):
        other = recipes.configure(recipes.find("quickstart"), {"optim.name": name})
        assert other.optim.weight_decay == decay
    kept = recipes.configure(recipes.find("quickstart"), {"optim.name": "sgd", "optim.weight_decay": 0.01})
    assert kept.optim.weight_decay == 0.01


def test_recipes_never_replace_what_the_user_named(tmp_path: Path) -> None:
    given = {"data.root": str(photos(tmp_path / "photos")), "train.device": "cpu"}
    folder = recipes.configure(recipes.find("folder"), given | {"model.backbone": "timm/test_vit"})
    assert folder.model.backbone == "timm/test_vit"
    assert (folder.model.stem, folder.model.width) == ("imagenet", 1.0)
    check_encoder(folder, inspect(folder))
    for name in ("timm/test_vit", "convnext_tiny"):  # which have none of what the recipe chose for its ResNet
        short = recipes.configure(recipes.find("cifar10-cpu"), {"model.backbone": name})
        assert (short.model.backbone, short.model.stem, short.model.stem_init) == (name, "imagenet", "random")
        check_encoder(short, inspect(short))
    other = recipes.configure(recipes.find("cifar10-cpu"), {"model.backbone": "resnet18", "model.width": 0.5})
    assert (other.model.backbone, other.model.stem, other.model.width) == ("resnet18", "small", 0.5)
    wrong = recipes.configure(
        recipes.find("cifar10-cpu"), {"model.backbone": "timm/test_vit", "model.width": 0.5}
    )
    with pytest.raises(UserError, match="Only torchvision's ResNets have a stem, a width"):
        inspect(wrong)
    chosen = recipes.configure(recipes.find("folder"), given)
    assert chosen.model == recipes.find("quickstart").config.model

    adapt = recipes.configure(recipes.find("adapt"), given | {"model.backbone": "timm/test_vit"})
    assert (adapt.model.pretrained, adapt.optim.layer_decay, adapt.train.epochs) == (True, 0.75, 20)
    assert adapt.data.image_size == 32
    own = recipes.configure(
        recipes.find("adapt"), given | {"model.backbone": "resnet18", "model.weights": "x.pth"}
    )
    assert (own.model.pretrained, own.optim.layer_decay) == (False, None)


def test_a_file_of_ones_own_is_adapted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = backbones.build("timm/test_resnet")
    save_file(network.state_dict(), tmp_path / "mine.safetensors")
    config = recipes.configure(
        recipes.find("adapt"),
        {
            "data.root": str(photos(tmp_path / "photos")),
            "model.backbone": "timm/test_resnet",
            "model.weights": str(tmp_path / "mine.safetensors"),
            "model.projector_hidden": 16,
            "train.steps": 2,
            "train.device": "cpu",
            "train.threads": 1,
            "monitor.report": False,
        },
    )
    assert pretrain(config, tmp_path / "run").finished
    start = starting_weights(config, {})
    assert start.record is not None
    assert load_encoder(tmp_path / "run").card.start == start.record
    assert start.record["name"] == "mine.safetensors"
    # Before the images, which may take long to decode.
    lost = replace(
        config, model=replace(config.model, weights="nowhere.pth"), data=DataConfig(root="nowhere")
    )
    with pytest.raises(UserError, match="no weights file"):
        pretrain(lost, tmp_path / "lost")


def test_nothing_is_imported_for_a_name(warm_python: str) -> None:
    """`import momentum2` imports neither library, and a network of torchvision does not import timm."""
    code = (
        "import sys, json; import momentum2, momentum2.api, momentum2.recipes; "
        "first = sorted({'timm', 'torchvision'} & set(sys.modules)); "
        "from momentum2 import backbones; backbones.build('resnet18'); "
        "print(json.dumps([first, 'timm' in sys.modules]))"
    )
    environment = dict(os.environ, PYTHONPATH=str(Path(momentum2.__file__).parents[1]))
    said = subprocess.run(
        [warm_python, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(said.splitlines()[-1]) == [[], False]
