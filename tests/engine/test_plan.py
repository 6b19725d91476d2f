"""Resolved numbers of the recipes against the paper's, and refusals in one sentence."""

from dataclasses import replace

import pytest

from momentum2.config import Config, MethodConfig, TrainConfig
from momentum2.engine.plan import describe, resolve
from momentum2.errors import UserError
from momentum2.recipes import RECIPES, find

IMAGENET, STL10 = 1_281_167, 105_000


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_resolves(name: str):
    config = find(name).config
    plan = resolve(config, IMAGENET)
    assert plan.steps > 0
    assert dict(describe(config, plan))["steps"]


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
    assert (m2.micro_batch, m2.devices, m2.student_bn, m2.teacher_bn) == (32, 1, 32, 32)
    assert m2.schedule.lr_base == pytest.approx(0.3 * 16)
    byol = resolve(find("byol").config, IMAGENET, world=128)
    assert (byol.student_bn, byol.teacher_bn) == (4096, 4096)
    moco = resolve(find("moco-v2").config, IMAGENET, world=32)
    assert {moco.schedule.alpha(k) for k in (0, moco.steps)} == {0.064}
    assert {moco.schedule.m(k) for k in (0, moco.steps)} == {0.001}
    assert moco.student_bn == 32


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (4, 1), (1, 4), (2, 4)])
def test_virtual_devices_belong_to_the_global_batch(world: int, accumulate: int):
    """The samples that share statistics do not depend on processes or micro-batches."""
    train = TrainConfig(batch_size=256, virtual_devices=8, accumulate=accumulate)
    plan = resolve(Config(method=MethodConfig(student_norm="split"), train=train), 10_000, world)
    assert plan.student_bn == 32
    assert plan.micro_batch == 256 // (world * accumulate)


@pytest.mark.parametrize(
    ("method", "train", "says"),
    [
        (MethodConfig(), TrainConfig(batch_size=100_000), "fewer than one batch"),
        (MethodConfig(), TrainConfig(batch_size=255, accumulate=2), "cannot be divided"),
        (MethodConfig(), TrainConfig(virtual_devices=4, accumulate=8), "multiple of their product"),
        (MethodConfig(), TrainConfig(epochs=0), "train.epochs must be at least 1"),
        (MethodConfig("moco", queue_size=8), TrainConfig(), "queue_size must be at least the batch size"),
    ],
)
def test_refusals(method: MethodConfig, train: TrainConfig, says: str):
    with pytest.raises(UserError, match=says):
        resolve(Config(method=method, train=train), 10_000)
