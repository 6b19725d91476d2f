import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

from momentum2.augment import draw, render, view_specs
from momentum2.config import Config, DataConfig, ViewsConfig
from momentum2.data import batch_indices
from momentum2.errors import UserError
from momentum2.evaluate.accuracy import report
from momentum2.evaluate.linear import LinearOptions, evaluate_linear
from momentum2.evaluate.protocols import ProtocolName, default_lr
from momentum2.evaluate.subject import SubjectOptions, open_subject
from momentum2.runs.metrics import read_metrics
from momentum2.seeds import derive

ONE = SubjectOptions(threads=1)
SHORT = LinearOptions(epochs=3, batch_size=46, floors=False)


@pytest.mark.parametrize(("name", "lr"), [("folder", 0.2), ("imagenet", 0.2), ("shapes", 0.5)])
def test_the_paper_s_rate_goes_by_the_kind_of_data(
    run: Path, pictures: Path, trained_with: Callable[..., Config], name: str, lr: float
):
    """ImageNet is ImageNet as a folder, too."""
    root = None if name == "shapes" else str(pictures)
    data = DataConfig(name, root, train_size=100, image_size=16, cache="off")
    with open_subject(run, replace(ONE, data=data)) as subject:
        config = trained_with(evaluate_linear, subject, LinearOptions(floors=False))
    assert config.optim.lr == lr


def test_the_paper_s_rates():
    """ "On STL10 ... 0.5 (for 256 batch-size)"; on ImageNet "fine-tuning uses learning rate 0.2"."""
    assert default_lr("paper", "stl10") == 0.5
    assert default_lr("paper", "imagenet") == 0.2
    assert {default_lr(name, "stl10") for name in ("moco", "simsiam", "byol")} == {30.0, 0.1, 0.2}


#: BN behind the classifier, optimizer, learning rate per 256 images, batch, epochs; as their authors' code has them.
PUBLISHED = {
    "paper": (True, "sgd", False, 0.2, None, 256, 80),
    "moco": (False, "sgd", False, 30.0, [0.6, 0.8], 256, 100),
    "simsiam": (False, "lars", False, 0.1, None, 4096, 90),
    "byol": (False, "sgd", True, 0.2, None, 4096, 80),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_protocols_are_the_published_ones(run: Path, trained_with: Callable[..., Config], name: ProtocolName):
    with open_subject(run, ONE) as subject:
        config = trained_with(evaluate_linear, subject, LinearOptions(name, floors=False))
        changed = LinearOptions(name, epochs=7, batch_size=50, lr=0.3, floors=False)
        other = trained_with(evaluate_linear, subject, changed)
    o = config.optim
    assert (o.weight_decay, o.sgd_momentum, o.warmup_epochs, o.exclude_bias_and_norm) == (0, 0.9, 0, False)
    assert o.lars_eta == 1e-3
    found = (config.method.classifier_norm, o.name, o.nesterov, o.lr, o.milestones)
    assert (*found, config.train.batch_size, config.train.epochs) == PUBLISHED[name]
    assert other == replace(
        config,
        optim=replace(o, lr=0.3),
        train=replace(config.train, epochs=7, batch_size=50, checkpoint_every=184 // 50),
    )


def trained_in_plain_torch(name: ProtocolName, head: torch.nn.Sequential, k: int, steps: int) -> None:
    """One step of the protocol, by its formulas; the velocity is kept with the parameter."""
    cosine = (math.cos(math.pi * k / steps) + 1) / 2
    in_steps = 1.0 if k < 0.6 * steps else 0.1 if k < 0.8 * steps else 0.01
    lr = 0.3 * 46 / 256 * (in_steps if name == "moco" else cosine)
    with torch.no_grad():
        for p in head.parameters():
            g = p.grad
            if name == "simsiam" and p.norm() > 0 and g.norm() > 0:
                g = g * 1e-3 * p.norm() / g.norm()
            if name == "simsiam":  # LARS has the rate in its velocity
                p.velocity = 0.9 * getattr(p, "velocity", 0) + lr * g
                p -= p.velocity
            else:
                p.velocity = 0.9 * getattr(p, "velocity", 0) + g
                p -= lr * (g + 0.9 * p.velocity if name == "byol" else p.velocity)
            p.grad = None


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_head_is_trained_by_its_protocol(run: Path, name: ProtocolName):
    """The same steps in plain torch from the same initial head: crops, optimizer, schedule, no decay."""
    with open_subject(run, ONE) as subject:
        result = evaluate_linear(subject, replace(SHORT, protocol=name, epochs=5, lr=0.3))
        assert result is not None
        assert result.evaluation == ("linear" if name == "paper" else f"linear {name}")
        train, encoder = subject.labeled.train, subject.encoder
        spec = view_specs(ViewsConfig("supervised"), 16)[0]
        torch.manual_seed(derive(0, "head"))
        head = torch.nn.Sequential(torch.nn.Linear(encoder.feature_dim, 10))
        torch.nn.init.normal_(head[0].weight, std=0.01)
        torch.nn.init.zeros_(head[0].bias)
        if name == "paper":
            head.append(torch.nn.BatchNorm1d(10))
        for k in range(20):
            indices = batch_indices(len(train), 0, k, 46)
            pixels = torch.from_numpy(np.asarray(train.read(indices))).permute(0, 3, 1, 2)
            views = render(pixels, [draw(spec, 0, k, 0, 46)], [spec], channels_last=True)[0]
            with torch.no_grad():
                features = encoder.eval()(views)
            loss = F.cross_entropy(head(features), torch.from_numpy(train.labels[indices]))
            loss.backward()
            trained_in_plain_torch(name, head, k, 20)
    out = run / result.evaluation.replace(" ", "-") / "teacher"
    saved = load_file(out / "checkpoints" / "step-00000020" / "shared.safetensors")
    assert {key for key in saved if key.startswith("method/head.")} == {
        f"method/head.{key}" for key in head.state_dict()
    }
    for key, value in head.named_parameters():
        torch.testing.assert_close(saved[f"method/head.{key}"], value, atol=1e-4, rtol=1e-3, msg=key)


def test_the_head_learns_and_the_encoder_does_not(run: Path):
    with open_subject(run, ONE) as subject:
        before = {name: value.clone() for name, value in subject.encoder.state_dict().items()}
        result = evaluate_linear(subject, SHORT)
        after = subject.encoder.state_dict()
        assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert result is not None
    out = run / "linear" / "teacher"
    epochs = [record for record in read_metrics(out / "metrics.jsonl") if "top1" in record]
    assert [record["step"] for record in epochs] == [0, 4, 8, 12]  # 184 images in batches of 46
    assert result.accuracy.top1 == pytest.approx(epochs[-1]["top1"], abs=1e-4)  # the last is the headline
    best = max(epochs[1:], key=lambda record: record["top1"])
    assert result.settings["top-1 of the best epoch"] == best["top1"]
    assert result.settings["best epoch"] == best["step"] / 4
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["method"]["freeze_encoder"] is True
    assert config["views"]["recipe"] == "supervised"
    assert config["optim"] | {"lr": 0.2, "weight_decay": 0.0, "sgd_momentum": 0.9} == config["optim"]


def test_the_same_command_gives_the_same_bits(run: Path, tmp_path: Path):
    """Whether it is trained again elsewhere or found finished."""
    with open_subject(run, ONE) as subject:
        results = [evaluate_linear(subject, replace(SHORT, out=str(tmp_path / d))) for d in ("a", "b", "a")]
        other = evaluate_linear(subject, replace(SHORT, out=str(tmp_path / "c"), lr=0.1))
    assert results[0] == results[1] == results[2]
    assert other != results[0]
    a, b = (sorted((tmp_path / d).rglob("shared.safetensors")) for d in ("a", "b"))
    assert [path.read_bytes() for path in a] == [path.read_bytes() for path in b]


def test_a_head_of_other_weights_is_not_taken_up(run: Path):
    with open_subject(run, ONE) as subject:
        evaluate_linear(subject, SHORT)
    out = run / "linear" / "teacher"
    with (
        open_subject(run, replace(ONE, network="student")) as subject,
        pytest.raises(UserError, match=r"model\.weights was sha256"),
    ):
        evaluate_linear(subject, replace(SHORT, out=str(out)))


def test_raw_pixels_by_the_paper_s_protocol(run: Path):
    with open_subject(run, replace(ONE, weights="pixels")) as subject:
        result = evaluate_linear(subject, replace(SHORT, epochs=1))
    assert result is not None
    assert (run / "linear" / "raw-pixels" / "config.yaml").exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (replace(SHORT, epochs=0), "^epochs must be at least 1"),
        (replace(SHORT, batch_size=500), "^batch_size 500 exceeds the number of images .184"),
    ],
)
def test_mistakes_are_one_sentence(run: Path, options: LinearOptions, sentence: str):
    with pytest.raises(UserError, match=sentence), open_subject(run, ONE) as subject:
        evaluate_linear(subject, options)


def test_results_of_different_protocols_stand_side_by_side(run: Path):
    with open_subject(run, ONE) as subject:
        for protocol in ("paper", "moco"):
            result = evaluate_linear(subject, replace(SHORT, protocol=protocol))
            assert result is not None
            report(result, subject.directory)
    found = json.loads((run / "results.json").read_text())
    assert list(found) == ["linear | pictures test | teacher", "linear moco | pictures test | teacher"]
    assert found["linear moco | pictures test | teacher"]["settings"]["lr"] == 30.0


def test_cached_is_reproducible_and_has_its_floors(run: Path):
    with open_subject(run, ONE) as subject:
        first = evaluate_linear(subject, LinearOptions("cached"))
        again = evaluate_linear(subject, LinearOptions("cached", floors=False))
        assert first is not None
        assert again == replace(first, floors={})
        report(first, subject.directory)
    assert list(first.floors) == ["random initialization", "raw pixels", "whitened patches"]
    entry = json.loads((run / "results.json").read_text())["linear cached | pictures test | teacher"]
    assert entry["accuracy"]["top1"] == first.accuracy.top1
    assert entry["floors"] == first.floors


def test_a_floor_by_the_paper_s_protocol_appears_beside_the_result(
    run: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "momentum2")
    for weights in ("random", "given"):
        with open_subject(run, replace(ONE, weights=weights)) as subject:
            result = evaluate_linear(subject, SHORT)
            assert result is not None
            report(result, subject.directory)
    found = json.loads((run / "results.json").read_text())
    floor = found["linear | pictures test | random initialization"]["accuracy"]["top1"]
    assert found["linear | pictures test | teacher"]["floors"] == {"random initialization": floor}
    assert f"floor  {floor:.2f}%  random initialization" in caplog.messages
