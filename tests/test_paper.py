"""The paper's settings, transcribed by hand: a recipe cannot drift from them unnoticed."""

import re
from dataclasses import replace

import pytest

from momentum2.config import Config
from momentum2.recipes import RECIPES as ALL
from momentum2.recipes import find
from momentum2.training.plan import resolve

SGD = {"optim.name": "sgd", "optim.sgd_momentum": 0.9, "optim.weight_decay": 1e-4}
WARM = {"optim.warmup_epochs": 10, "optim.warmup_start": 0.001}
SCHEDULED = {"method.alpha": "cosine", "method.alpha_base": 1.0, "method.weight_schedule": "cosine"}
M2 = {
    "method.name": "byol",
    "method.student_norm": "local",
    "method.teacher_norm": "momentum",
    "method.export": None,  # the teacher: "we dump the model from teacher"
    "model.zero_init_residual": False,
}
IMAGENET = {
    "model.backbone": "resnet50",
    "model.stem": "imagenet",
    "model.projector_hidden": 4096,
    "model.projector_out": 256,
    "model.predictor_hidden": None,
    "data.image_size": 224,
    "views.recipe": "byol",
}
LARS = {
    "optim.name": "lars",
    "optim.lr": 0.3,
    "optim.sgd_momentum": 0.9,
    "optim.weight_decay": 1.5e-6,
    "optim.lars_eta": 1e-3,
    "optim.exclude_bias_and_norm": True,
    "method.weight_momentum": 0.01,
    "train.epochs": 300,
    "train.batch_size": 4096,
    "train.devices": 128,
}
RECIPES: dict[str, dict[str, object]] = {
    "stl10": {
        **SGD,
        **WARM,
        **SCHEDULED,
        **M2,
        "optim.lr": 0.1,
        "optim.exclude_bias_and_norm": False,
        "method.weight_momentum": 0.032,
        "method.reference_batch": 2048,
        "model.backbone": "resnet18",
        "model.stem": "imagenet",
        "model.projector_hidden": 512,
        "model.projector_out": 128,
        "model.predictor_hidden": None,
        "data.split": "train+unlabeled",
        "data.image_size": 96,
        "train.epochs": 400,
        "train.batch_size": 2048,
        "train.devices": 64,
    },
    "imagenet-1node": {
        **SGD,
        **WARM,
        **SCHEDULED,
        **M2,
        **IMAGENET,
        "optim.lr": 0.05,
        "optim.exclude_bias_and_norm": False,
        "method.weight_momentum": 0.01,
        "method.reference_batch": 256,
        "train.epochs": 100,
        "train.batch_size": 256,
        "train.devices": 8,
    },
    "imagenet-1node-1024": {
        **SGD,
        **WARM,
        **SCHEDULED,
        **M2,
        **IMAGENET,
        "optim.lr": 0.05,
        "optim.exclude_bias_and_norm": False,
        "method.weight_momentum": 0.01,
        "method.reference_batch": 1024,
        "train.epochs": 100,
        "train.batch_size": 1024,
        "train.devices": 8,
    },
    "imagenet-32gpu": {
        **LARS,
        **WARM,
        **SCHEDULED,
        **M2,
        **IMAGENET,
        "optim.weight_decay": 1e-6,
        "method.reference_batch": 4096,
        "train.devices": 32,
    },
    "imagenet-128gpu": {**LARS, **WARM, **SCHEDULED, **M2, **IMAGENET, "method.reference_batch": 4096},
    "byol": {
        **LARS,
        **WARM,
        **SCHEDULED,
        **IMAGENET,
        "method.name": "byol",
        "method.student_norm": "synced",
        "method.teacher_norm": "synced",
        "method.reference_batch": None,
        "method.export": "student",
        "model.zero_init_residual": True,
        "optim.weight_decay": 1e-6,  # BYOL's own, for 300 epochs
    },
    "moco-v2": {
        **SGD,
        "optim.lr": 0.03,
        "optim.warmup_epochs": 0,
        "method.name": "moco",
        "method.student_norm": "local",
        "method.teacher_norm": "momentum",
        "method.alpha": 0.064,
        "method.weight_momentum": 0.001,
        "method.weight_schedule": "constant",
        "method.reference_batch": None,
        "method.export": "student",
        "method.temperature": 0.2,
        "method.queue_size": 65536,
        "model.backbone": "resnet50",
        "model.projector_hidden": 2048,
        "model.projector_out": 128,
        "model.zero_init_residual": False,
        "data.image_size": 224,
        "views.recipe": "moco_v2",
        "train.epochs": 200,
        "train.batch_size": 1024,
        "train.devices": 32,
    },
    "simsiam": {
        **SGD,
        **IMAGENET,
        "optim.lr": 0.05,
        "optim.warmup_epochs": 0,
        "method.name": "simsiam",
        "method.student_norm": "synced",
        "method.reference_batch": None,
        "model.projector_hidden": 2048,
        "model.projector_out": 2048,
        "model.predictor_hidden": 512,
        "model.zero_init_residual": True,
        "views.recipe": "simsiam",
        "train.epochs": 100,
        "train.batch_size": 256,
    },
    "simclr": {
        **LARS,
        **WARM,
        **IMAGENET,
        "optim.weight_decay": 1e-6,
        "method.name": "simclr",
        "method.student_norm": "synced",
        "method.reference_batch": None,
        "method.temperature": 0.1,
        "model.projector_hidden": 2048,
        "model.projector_out": 128,
        "model.zero_init_residual": True,
        "views.recipe": "simclr",
        "train.epochs": 200,
    },
    "dino": {  # its README's command for a ResNet-50, and the defaults of main_dino.py
        **SGD,
        **IMAGENET,
        **WARM,
        "optim.lr": 0.03,
        "optim.clip_norm": 3.0,
        "optim.exclude_bias_and_norm": True,
        "method.name": "dino",
        "method.student_norm": "synced",
        "method.teacher_norm": "synced",
        "method.weight_momentum": 0.004,
        "method.weight_schedule": "cosine",
        "method.reference_batch": None,
        "method.export": None,
        "method.temperature": 0.1,
        "method.teacher_temperature": 0.04,
        "method.teacher_temperature_start": 0.04,
        "method.teacher_temperature_warmup": 0,
        "method.center_momentum": 0.9,
        "method.freeze_last_layer": 0.01,  # one epoch of a hundred
        "method.projector_norm": False,
        "model.projector_hidden": 2048,
        "model.projector_out": 65536,
        "model.zero_init_residual": False,
        "views.recipe": "multicrop",
        "views.crop_min": None,  # 0.14 to 1, and 0.05 to 0.14 for small crops: multicrop's own
        "views.small_crops": 8,
        "views.small_size": 96,
        "train.epochs": 100,
        "train.batch_size": 512,
    },
}
RECIPES["moco-v2-8gpu"] = {
    **RECIPES["moco-v2"],
    "method.teacher_norm": "shuffle",
    "train.batch_size": 256,
    "train.devices": 8,
}
RECIPES["moco-eman"] = {**RECIPES["moco-v2-8gpu"], "method.teacher_norm": "ema", "optim.warmup_epochs": 10}
RECIPES["byol-eman"] = {
    **LARS,
    **WARM,
    **IMAGENET,
    "method.name": "byol",
    "method.student_norm": "local",
    "method.teacher_norm": "ema",
    "method.weight_momentum": 0.02,
    "method.weight_schedule": "cosine",
    "method.reference_batch": None,
    "method.export": "student",
    "views.crop_min": 0.2,
    "optim.lr": 0.9,
    "optim.weight_decay": 1e-6,
    "train.epochs": 200,
    "train.batch_size": 512,
    "train.devices": 8,
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_the_paper_has_its_settings(name: str):
    config = find(name).config
    has = {field: setting(config, field) for field in RECIPES[name]}
    assert has == RECIPES[name]


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_says_what_it_is_how_it_runs_and_whose_its_number_is(name: str):
    recipe = find(name)
    assert recipe.summary
    assert f" pretrain {name} " in recipe.command
    assert "--out runs/" in recipe.command
    sources = (
        "paper: ",
        "release: ",
        "EMAN's authors: ",
        "measured: ",
        "not measured",
        "depends on the images",
    )
    assert recipe.expect.startswith(sources)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("stl10", ["88.18"]),
        ("imagenet-1node", ["70.4"]),
        ("imagenet-1node-1024", ["70.7", "72.7", "73.8"]),
        ("imagenet-32gpu", ["73.7"]),
        ("imagenet-128gpu", ["72.0", "72.9", "74.5"]),
        ("byol", ["72.5"]),
        ("moco-v2", ["67.8", "66.8"]),
        ("moco-v2-8gpu", ["67.5"]),
        ("simsiam", ["68.1"]),
    ],
)
def test_a_recipe_promises_the_published_numbers(name: str, numbers: list[str]):
    assert re.findall(r"\d+\.\d+", find(name).expect) == numbers


@pytest.mark.parametrize("name", ALL)
def test_m_grows_with_the_batch_in_momentum2_teacher_alone(name: str):
    config = find(name).config
    m = [
        resolve(replace(config, train=replace(config.train, batch_size=n)), 1_281_167).schedule.m(0)
        for n in (config.train.batch_size, 2 * config.train.batch_size)
    ]
    momentum2_teacher = config.method.name == "byol" and config.method.teacher_norm == "momentum"
    momentum2_teacher &= config.method.repulsion == "none"  # the short recipes depart from the paper
    assert m == pytest.approx([config.method.weight_momentum * n for n in (1, 1 + momentum2_teacher)])


def setting(config: Config, field: str) -> object:
    section, name = field.split(".")
    return getattr(getattr(config, section), name)
