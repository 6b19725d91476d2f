"""What is called unused changes nothing, all else changes something, and who gives an unused setting is told."""

from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

import momentum2 as m2
from momentum2.backbones import with_feature_dim
from momentum2.cli import main
from momentum2.config import (
    Config,
    DataConfig,
    MethodConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)
from momentum2.errors import SettingError
from momentum2.methods import METHODS
from momentum2.optim import READ_BY, build_optimizer
from momentum2.recipes import find
from momentum2.settings import leaves, override
from momentum2.training.plan import resolve, unused_settings

#: Another value of each setting that some methods read and others do not.
OTHER: dict[str, object] = {
    "method.student_norm": "synced",
    "method.teacher_norm": "ema",
    "method.alpha": 0.3,
    "method.alpha_base": 0.5,
    "method.weight_momentum": 0.7,
    "method.weight_schedule": "constant",
    "method.reference_batch": 2,
    "method.history": "global",
    "method.compat": "official",
    "method.repulsion": "batch",
    "method.predictor": False,
    "method.temperature": 0.7,
    "method.queue_size": 8,
    "method.teacher_temperature": 0.1,
    "method.teacher_temperature_start": 0.2,
    "method.teacher_temperature_warmup": 0.5,
    "method.center_momentum": 0.1,
    "method.freeze_last_layer": 1.0,
    "method.projector_norm": True,
    "method.freeze_encoder": True,
    "method.export": "student",
    "method.classifier_norm": False,
    "model.projector_hidden": 6,
    "model.projector_out": 3,
    "model.predictor_hidden": 6,
}
CASES = {
    "byol": MethodConfig("byol"),
    "byol with repulsion": MethodConfig("byol", repulsion="batch", predictor=False, alpha=0.5),
    "byol with plain norms": MethodConfig("byol", teacher_norm="local"),
    "byol with alpha auto": MethodConfig("byol", alpha="auto"),
    "moco": MethodConfig("moco", queue_size=4),
    "simsiam": MethodConfig("simsiam"),
    "simsiam with Momentum BN": MethodConfig("simsiam", student_norm="momentum"),
    "simclr": MethodConfig("simclr"),
    "dino": MethodConfig("dino", teacher_temperature_start=0.02),
    "dino with a warm-up": MethodConfig(
        "dino", teacher_temperature_start=0.02, teacher_temperature_warmup=1.0
    ),
    "supervised": MethodConfig("supervised"),
    "supervised, frozen": MethodConfig("supervised", freeze_encoder=True),
}
#: What would take several devices or processes to see.
UNSEEN = {"method.history", "method.student_norm"}


def config_of(method: MethodConfig) -> Config:
    return Config(
        method=method,
        model=ModelConfig(projector_hidden=4, projector_out=2),
        data=DataConfig("shapes", image_size=8),
        views=ViewsConfig("supervised" if method.name == "supervised" else "byol"),
        train=TrainConfig(steps=4, batch_size=4, threads=1, precision="fp32", device="cpu"),
        optim=OptimConfig(lr=6.4),
    )


@cache
def outcome(config: Config) -> dict[str, Tensor]:
    """All that two steps leave behind."""
    plan = resolve(config, 8)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    encoder = with_feature_dim(nn.Sequential(*layers), 8)
    method = plan.method(config, plan.schedule, encoder, plan.local_devices, 3)  # type: ignore[call-arg,arg-type]
    optimizer = build_optimizer(method.train().named_parameters(), config.optim, lr=0.1)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for k in (1, 2):
        views = [torch.randn(4, 3, 8, 8, generator=generator) for _ in range(method.views[0])]
        method.before_step(k)
        output = method(views, torch.tensor([0, 1, 2, 0]))
        output.loss.backward()
        method.keep(output)
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {k}"] = output.loss.detach()
        method.after_step(k)
    exported = torch.tensor([name == "student" for name in method.encoders()])
    return {**found, "exported": exported, **method.state_dict()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("case", CASES)
def test_what_is_unused_changes_nothing_and_all_else_something(case: str) -> None:
    config = config_of(CASES[case])
    kind = METHODS[config.method.name]
    unused = unused_settings(config, kind)
    for name, value in OTHER.items():
        if name in UNSEEN and name not in unused:
            continue
        changed = override(config, {name: value})
        try:
            found = outcome(changed)
        except SettingError:
            continue  # nobody can give it in vain
        if changed != config:
            assert same(outcome(config), found) == (name in unused), name


def test_every_setting_of_a_method_is_all_methods_or_somebodys() -> None:
    of_some = set().union(*(kind.reads for kind in METHODS.values()))
    of_all = {"method.name", "method.student_norm", "method.alpha", "method.alpha_base", "method.compat"}
    assert {name for name in leaves(Config) if name.startswith("method.")} == {
        name for name in of_some | of_all if name.startswith("method.")
    }
    assert of_some <= OTHER.keys()


@pytest.mark.parametrize("name", ["sgd", "lars", "muon", "adamw"])
def test_an_optimizer_reads_what_it_is_said_to(name: str) -> None:
    """Three steps on a matrix, with another value of each setting; `weight_decay_end` is the loop's."""

    def taken(**settings: object) -> Tensor:
        weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3) + 1)
        config = replace(OptimConfig(name, weight_decay=0.1), **settings)  # type: ignore[arg-type]
        optimizer = build_optimizer([("w", weight)], config, lr=0.1)
        for k in range(3):
            weight.grad = torch.ones(2, 3) * (k + 1) + torch.eye(2, 3)
            optimizer.step()
        return weight.detach()

    others = {"sgd_momentum": 0.5, "nesterov": True, "lars_eta": 0.5}
    for setting, value in others.items():
        assert torch.equal(taken(), taken(**{setting: value})) == (name not in READ_BY[setting]), setting


@pytest.mark.parametrize(
    ("recipe", "given", "sentence"),
    [
        ("byol", {"method.queue_size": 4096}, "method.queue_size has"),
        ("byol", {"optim.name": "sgd", "optim.lars_eta": 0.1}, "optim.lars_eta has"),
        (
            "simsiam",
            {"method": {"temperature": 0.3}, "train.devices": 2, "train.seed": 1},
            "method.temperature and train.devices have",
        ),
        ("quickstart", {"train.steps": 9, "train.epochs": 2}, "train.epochs has"),
        ("quickstart", {"eval_data.name": "none", "monitor.knn_every": 1}, "monitor.knn_every has"),
        ("quickstart", {"method.temperature": 0.3, "monitor.knn_k": 5, "optim.nesterov": False}, ""),
        ("dino", {"views.small_size": 64, "method.history": "global"}, "method.history has"),
        ("byol", asdict(find("moco-v2").config), ""),  # a whole config: nobody chose each of its settings
    ],
)
def test_who_gives_a_setting_without_effect_is_told(
    recipe: str, given: dict[str, object], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    m2.recipe(recipe, given)
    assert caplog.messages == ([f"{sentence} no effect in this run."] if sentence else [])


def test_a_flag_and_a_file_of_overrides_are_told_but_not_a_runs_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, some = tmp_path / "config.yaml", tmp_path / "some.yaml"
    whole.write_text(yaml.safe_dump(asdict(find("quickstart").config)))
    some.write_text("method: {queue_size: 4096}\n")

    def told(*words: str) -> str:
        assert main(["plan", "--images", "1000", *words]) == 0
        return capsys.readouterr().err

    assert told("--config", str(whole)) == ""
    assert told("quickstart", "--config", str(some)) == "method.queue_size has no effect in this run.\n"
    assert told("--config", str(whole), "--optim.lars_eta=1") == "optim.lars_eta has no effect in this run.\n"
