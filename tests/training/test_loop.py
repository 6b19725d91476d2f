"""The loop, on runs small enough to be run whole."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from momentum2.api import pretrain
from momentum2.config import (
    Config,
    DataConfig,
    History,
    MethodConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    TrainConfig,
    ViewsConfig,
)
from momentum2.errors import UserError
from momentum2.runs.metrics import read_metrics
from momentum2.settings import config_from_file

TINY = Config(
    method=MethodConfig(weight_momentum=0.1, reference_batch=16, queue_size=32),
    model=ModelConfig("resnet18", "small", width=0.125, projector_hidden=16, projector_out=8),
    data=DataConfig("shapes", image_size=32, train_size=64, cache="off"),
    train=TrainConfig(steps=3, batch_size=16, threads=1, precision="fp32"),
    optim=OptimConfig(lr=0.5),
    monitor=MonitorConfig(log_every=1, report=False),
)


def tensors(run: Path, step: int = 3) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    saved = load_file(folder / "shared.safetensors")
    return {name.split("method/")[1]: tensor for name, tensor in saved.items() if "method/" in name}


@pytest.mark.parametrize(
    "method",
    [
        MethodConfig("byol"),
        MethodConfig("byol", student_norm="synced", teacher_norm="synced"),
        MethodConfig("byol", student_norm="local", teacher_norm="local"),
        MethodConfig("byol", student_norm="momentum"),
        MethodConfig("moco", queue_size=32, student_norm="local", teacher_norm="shuffle"),
        MethodConfig("moco", queue_size=32, alpha=0.064, weight_schedule="constant"),
        MethodConfig("byol", student_norm="momentum", alpha="auto"),
        MethodConfig("simsiam"),
        MethodConfig("simclr"),
        MethodConfig("dino"),
        MethodConfig("dino", teacher_norm="local", projector_norm=True),
        MethodConfig("supervised"),
        MethodConfig("supervised", freeze_encoder=True),
    ],
    ids=lambda m: f"{m.name}-{m.student_norm}-{m.teacher_norm}-{m.alpha}-{m.freeze_encoder}",
)
def test_every_method_runs_and_leaves_an_encoder(method: MethodConfig, tmp_path: Path):
    views = ViewsConfig("supervised" if method.name == "supervised" else "byol")
    train = replace(TINY.train, steps=2, devices=2)
    assert pretrain(replace(TINY, method=method, views=views, train=train), tmp_path).finished
    logged = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "alarm" not in r]  # of a busy machine
    assert [record["step"] for record in logged] == [1, 2]
    assert all(torch.isfinite(torch.tensor(record["loss"])) for record in logged)
    encoder = load_file(tmp_path / "encoder.safetensors")
    from momentum2 import backbones

    backbones.build("resnet18", "small", 0.125).load_state_dict(encoder)  # strictly


def test_accumulation_is_one_step(tmp_path: Path):
    """4 micro-batches of one device are, with local norms, one batch of 4 devices: one step, one EMA."""
    method = replace(TINY.method, student_norm="local", teacher_norm="local")
    config = replace(TINY, method=method, optim=OptimConfig(lr=0.01))
    for name, accumulate in (("once", 1), ("four", 4)):
        train = replace(TINY.train, batch_size=32, devices=4 // accumulate, accumulate=accumulate, steps=2)
        pretrain(replace(config, train=train), tmp_path / name)
    once, four = tensors(tmp_path / "once", 2), tensors(tmp_path / "four", 2)
    assert once.keys() == four.keys()
    for name, value in once.items():
        if "running" not in name and "num_batches" not in name:
            # Running statistics are those of the first device at each forward: 1 or 4 per step.
            torch.testing.assert_close(four[name], value, rtol=1e-3, atol=1e-4, msg=name)
    losses = [
        [r["loss"] for r in read_metrics(tmp_path / n / "metrics.jsonl") if "loss" in r]
        for n in ("once", "four")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_run_is_a_function_of_its_config(tmp_path: Path):
    pretrain(TINY, tmp_path / "a")
    pretrain(config_from_file(tmp_path / "a" / "config.yaml"), tmp_path / "b")
    pretrain(replace(TINY, train=replace(TINY.train, seed=1)), tmp_path / "c")
    a, b, c = (tensors(tmp_path / name) for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["student.encoder.conv1.weight"], c["student.encoder.conv1.weight"])


def test_what_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def score(encoders: object, done: int) -> dict[str, float]:
        calls.append(encoders)
        return {"knn_top1": 50.0}

    config = replace(TINY, monitor=MonitorConfig(log_every=1, knn_every=1, tensorboard=True, report=False))
    monkeypatch.setattr("momentum2.api.online_knn", lambda *_: score)
    pretrain(config, tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    training = [r for r in records if "loss" in r]
    wanted = "lr m alpha z_std z_rank statistics_drift data_wait images_per_second memory_gb grad_norm"
    assert all(set(wanted.split()) <= r.keys() for r in training)
    assert [r["step"] for r in records if "knn_top1" in r] == [0, 3]  # before training, and at the end
    assert training[0]["alpha"] == 1.0
    assert training[0]["m"] == pytest.approx(0.1)
    assert list((tmp_path / "tensorboard").iterdir())
    assert "teacher BN" in (tmp_path / "plan.txt").read_text()


@pytest.mark.parametrize("history", ["local", "global"])
def test_a_resumed_run_goes_on_choosing_its_alphas(tmp_path: Path, history: History):
    method = replace(TINY.method, alpha="auto", history=history)
    train = replace(TINY.train, steps=20, checkpoint_every=15, devices=2)
    config = replace(TINY, method=method, train=train)
    assert pretrain(config, tmp_path).finished
    exported, logged = load_file(tmp_path / "encoder.safetensors"), read_metrics(tmp_path / "metrics.jsonl")
    last = tmp_path / "checkpoints" / "step-00000020"
    saved = load_file(last / "devices.safetensors")
    assert {name.rpartition(".")[2] for name in saved} == {
        *("running_mean", "running_var", "alpha", "correlation", "last_mean", "last_var")
    }
    assert not any(word in name for name in exported for word in ("alpha", "correlation", "last_"))
    (tmp_path / "encoder.safetensors").unlink()
    shutil.rmtree(last)
    assert pretrain(config, tmp_path).finished
    again = load_file(last / "devices.safetensors")
    assert all(torch.equal(again[name], saved[name]) for name in saved)
    wanted = ("loss", "alpha", "alpha_min", "alpha_max", "alpha_first", "alpha_last")
    both = [
        [[r[name] for name in wanted] for r in rs if "loss" in r]
        for rs in (logged, read_metrics(tmp_path / "metrics.jsonl"))
    ]
    assert both[0] == both[1]
    assert both[0][0][1:] == [1.0] * 5
    assert both[0][1][1:] == [0.5] * 5
    assert both[0][-1][2] < both[0][-1][3]
    assert "each norm chooses its own" in (tmp_path / "plan.txt").read_text()


def test_a_run_that_ends_in_its_last_validation_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Killed(Exception):
        pass

    trained = []

    def score(encoders: object, done: int) -> dict[str, float]:
        if not trained:
            trained.append(True)
            return {"knn_top1": 10.0}
        raise Killed

    config = replace(TINY, monitor=MonitorConfig(log_every=1, knn_every=1, report=False))
    monkeypatch.setattr("momentum2.api.online_knn", lambda *_: score)
    with pytest.raises(Killed):
        pretrain(config, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    for _ in range(2):  # what was missing is measured once, without a step being run again
        monkeypatch.setattr("momentum2.api.online_knn", lambda *_: lambda encoders, done: {"knn_top1": 50.0})
        assert pretrain(config, tmp_path).finished
    after = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in after.removeprefix(before).splitlines()] == [
        {"step": 3, "knn_top1": 50.0}
    ]


def test_supervised_without_labels_is_one_sentence(tmp_path: Path):
    from PIL import Image

    for i in range(8):
        Image.new("RGB", (32, 32), (i, i, i)).save(tmp_path / f"{i}.png")
    data = DataConfig("folder", str(tmp_path), image_size=32)
    config = replace(TINY, method=MethodConfig("supervised"), views=ViewsConfig("supervised"), data=data)
    with pytest.raises(UserError, match="needs labels"):
        pretrain(config, tmp_path / "run")
