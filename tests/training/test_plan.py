"""Resolved numbers of the recipes against the paper's, and refusals in one sentence."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from momentum2.config import Config, DataConfig, MethodConfig, ModelConfig, TrainConfig
from momentum2.errors import UserError
from momentum2.methods import BYOL
from momentum2.recipes import RECIPES, find
from momentum2.runs.card import inspect
from momentum2.training.estimate import planned
from momentum2.training.plan import describe, per_device, resolve

IMAGENET, STL10 = 1_281_167, 105_000


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves(name: str):
    config = find(name).config
    plan = resolve(config, IMAGENET)
    assert plan.steps > 0
    assert dict(describe(config, plan, inspect(config)))["steps"]


def test_a_plan_says_where_batch_norm_is():
    def line(method: MethodConfig) -> str | None:
        config = Config(method=method, model=ModelConfig("timm/test_vit"), data=DataConfig(image_size=32))
        return dict(describe(config, resolve(config, IMAGENET), inspect(config))).get("batch norm")

    assert line(MethodConfig()) == "the encoder has none; only its heads have, so norms and alpha are theirs"
    none = "the encoder has none; nor have its heads, so norms and alpha have no effect"
    assert [line(MethodConfig("moco")), line(MethodConfig("dino"))] == [none, none]
    assert line(MethodConfig("dino", projector_norm=True)) != none
    resnet = find("quickstart").config
    assert "batch norm" not in dict(describe(resnet, resolve(resnet, IMAGENET), inspect(resnet)))


def test_a_plan_says_that_views_are_repeated():
    def line(name: str) -> str | None:
        config = find(name).config
        return dict(describe(config, resolve(config, IMAGENET), inspect(config))).get("views")

    assert line("quickstart") == "4 per image: the 2 of the augmentations byol, each drawn 2 times"
    assert line("quickstart-paper") is None


def test_stl10_is_the_papers():
    plan = resolve(find("stl10").config, STL10)
    assert plan.schedule.lr_base == pytest.approx(0.1 * 2048 / 256)
    assert plan.schedule.m(0) == pytest.approx(0.032)
    assert plan.schedule.alpha(0) == 1.0
    assert (plan.student_bn, plan.teacher_bn) == (32, 32)
    assert plan.steps == 400 * (STL10 // 2048)
    assert plan.schedule.warmup == 10 * (STL10 // 2048)


def test_single_machine_scales_lr_and_m_together():
    config = find("imagenet-1node").config
    small = resolve(config, IMAGENET, world=8)
    large = resolve(replace(config, train=replace(config.train, batch_size=1024)), IMAGENET, world=8)
    assert (small.student_bn, large.student_bn) == (32, 128)
    assert small.schedule.lr_base == pytest.approx(0.05)
    assert large.schedule.lr_base == pytest.approx(0.2)
    assert small.schedule.m(0) == pytest.approx(0.01)
    assert large.schedule.m(0) == pytest.approx(0.04)


def test_cluster_recipes():
    m2 = resolve(find("imagenet-128gpu").config, IMAGENET, world=128)
    assert (m2.micro_batch, m2.devices, m2.local_devices) == (32, 128, 1)
    assert (m2.student_bn, m2.teacher_bn) == (32, 32)
    assert m2.schedule.lr_base == pytest.approx(0.3 * 16)
    byol = resolve(find("byol").config, IMAGENET, world=128)
    assert (byol.student_bn, byol.teacher_bn) == (4096, 4096)
    moco = resolve(find("moco-v2").config, IMAGENET, world=32)
    assert {moco.schedule.alpha(k) for k in (0, moco.steps)} == {0.064}
    assert {moco.schedule.m(k) for k in (0, moco.steps)} == {0.001}
    assert moco.student_bn == 32


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (4, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize(
    ("student", "teacher", "samples"),
    [("local", "momentum", 32), ("synced", "synced", 256), ("local", "ema", 32)],
)
def test_devices_decide_and_processes_do_not(student, teacher, samples, world: int, accumulate: int):
    train = TrainConfig(batch_size=256, devices=8, accumulate=accumulate)
    plan = resolve(Config(method=MethodConfig("byol", student, teacher), train=train), 10_000, world)
    assert plan.student_bn == samples // accumulate
    assert plan.teacher_bn == (None if teacher == "ema" else samples // accumulate)
    assert plan.micro_batch == 256 // (world * accumulate)
    assert plan.local_devices * world == (
        8 if per_device(Config(method=MethodConfig("byol", student, teacher)), BYOL) else world
    )


def test_auto_is_the_number_of_processes():
    plan = resolve(Config(train=TrainConfig(batch_size=64)), 10_000, world=4)
    assert (plan.devices, plan.local_devices, plan.student_bn) == (4, 1, 16)


@pytest.mark.parametrize(
    ("method", "train", "says"),
    [
        (MethodConfig(), TrainConfig(batch_size=100_000), "exceeds the number of images"),
        (MethodConfig(), TrainConfig(batch_size=255, accumulate=2), "cannot be divided"),
        (MethodConfig(), TrainConfig(batch_size=256, devices=5), "Choose a multiple of 5"),
        (MethodConfig(), TrainConfig(batch_size=256, devices=128, accumulate=2), "but would get 1"),
        (MethodConfig(), TrainConfig(epochs=0), "train.epochs must be at least 1"),
        (MethodConfig("moco", queue_size=8), TrainConfig(), "queue_size must be at least the batch size"),
    ],
)
def test_refusals(method: MethodConfig, train: TrainConfig, says: str):
    with pytest.raises(UserError, match=says):
        resolve(Config(method=method, train=train), 10_000)


def test_devices_that_processes_cannot_share_are_refused_where_they_matter():
    with pytest.raises(UserError, match=r"4 cannot be divided among 3 processes. Start 1 or 2 or 4 of them"):
        resolve(Config(train=TrainConfig(batch_size=96, devices=4)), 10_000, world=3)
    synced = MethodConfig("byol", "synced", "synced")
    assert resolve(Config(method=synced, train=TrainConfig(batch_size=96, devices=4)), 10_000, world=3)


def test_a_plan_says_what_the_cores_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for i in range(8):
        Image.new("RGB", (40, 40), (30 * i, 0, 0)).save(tmp_path / f"{i}.png")
    data = DataConfig("folder", str(tmp_path), image_size=32, workers=3)
    model = ModelConfig("resnet18", "small", 0.125, projector_hidden=8, projector_out=4)
    config = Config(model=model, data=data, train=TrainConfig(batch_size=4, devices=1, device="cpu"))
    said = dict(planned(config, None, 1, probe=False))["feeding"]
    one, three = re.match(
        r"one core prepares about (\d+) images/s \(measured on 8\); 3 workers give about (\d+)$", said
    ).groups()
    assert int(three) == pytest.approx(3 * int(one), abs=2)
    monkeypatch.setattr("momentum2.training.estimate.step_seconds", lambda *_: 1e-6)
    assert dict(planned(config, None, 1, probe=True))["feeding"].endswith(
        ", a step asks for 4000000: raise data.workers, or set data.cache to on"
    )
