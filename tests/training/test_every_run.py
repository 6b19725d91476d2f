"""Nothing that `check` accepts ends in a traceback: all is planned, and trained for two steps."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch

from momentum2.api import pretrain
from momentum2.cli import main
from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    NormName,
    TeacherNormName,
    TrainConfig,
    ViewsConfig,
)
from momentum2.errors import UserError
from momentum2.methods import METHODS
from momentum2.recipes import RECIPES, find
from momentum2.runs.metrics import read_metrics
from momentum2.training.build import build_method
from momentum2.training.checks import check
from momentum2.training.estimate import make_step, planned
from momentum2.training.plan import resolve

DATA = DataConfig("shapes", image_size=16, train_size=32, cache="off")
MODEL = ModelConfig("resnet18", "small", width=0.125, projector_hidden=16, projector_out=8)
TRAIN = TrainConfig(steps=2, batch_size=16, devices=4, precision="fp32", device="cpu", threads=1)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The recipes for image files look at some; those of data sets that are the same everywhere need none."""
    files = []
    if find(name).config.data.name == "folder":
        from PIL import Image

        for i in range(256):
            Image.new("RGB", (32, 32), (i, 0, 0)).save(tmp_path / f"{i}.png")
        files = ["--data.root", str(tmp_path)]
    assert main(["plan", name, *files, "--train.device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "GB for activations" in said
    assert ("simclr" if name == "folder" else find(name).config.method.name) in said  # on a CPU


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains(name: str, tmp_path: Path):
    """With its own method, views and optimizer, on a small network and a few images."""
    config = find(name).config
    model = replace(MODEL, predictor_hidden=config.model.predictor_hidden)
    train = replace(TRAIN, devices="auto" if config.train.devices == "auto" else 4)
    monitor = replace(config.monitor, knn_every=0, log_every=1)
    views = replace(config.views, small_size=8)
    optim = replace(config.optim, layer_decay=None)  # for networks of timm
    config = replace(
        config, model=model, data=DATA, eval_data=DATA, views=views, train=train, monitor=monitor, optim=optim
    )
    assert pretrain(config, tmp_path / "run").finished
    losses = [r["loss"] for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()
    assert (tmp_path / "run" / "encoder.safetensors").exists()


def test_residual_branches_start_at_zero_in_both_networks():
    for zero in (True, False):
        config = Config(model=replace(MODEL, zero_init_residual=zero), data=DATA, train=TRAIN)
        state = build_method(config, resolve(config, 32), 10).state_dict()
        last = {n: w for n, w in state.items() if "encoder.layer" in n and n.endswith("bn2.weight")}
        assert {n.split(".")[0] for n in last} == {"student", "teacher"}
        assert len(last) == 2 * 8
        assert all(bool(w.any()) is not zero for w in last.values())


def accepted() -> list[Config]:
    """Every method with every pair of norms that `check` lets pass."""
    configs = []
    for name, student, teacher in product(METHODS, get_args(NormName), get_args(TeacherNormName)):
        method = MethodConfig(name, student_norm=student, teacher_norm=teacher, queue_size=32)
        views = ViewsConfig("supervised" if name == "supervised" else "byol")
        config = Config(method=method, model=MODEL, data=DATA, views=views, train=TRAIN)
        try:
            check(config, METHODS[name])
        except UserError:
            continue
        if (
            METHODS[name].has_teacher or teacher == "momentum"
        ):  # where there is no teacher, its norm does not count
            configs.append(config)
    return configs


@pytest.mark.parametrize(
    "config",
    accepted(),
    ids=lambda c: f"{c.method.name}-{c.method.student_norm}-{c.method.teacher_norm}",
)
def test_every_method_and_norm_is_planned_and_trains(config: Config):
    lines = dict(planned(config, None, 1, probe=False))
    assert "GB for activations" in lines["memory"]
    step = make_step(config, resolve(config, 32), 10, torch.device("cpu"))
    for k in range(2):
        step(k)
