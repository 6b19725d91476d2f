"""What `momentum2 reproduce stability` measures, against closed forms that know nothing of its code."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from momentum2.cli import main
from momentum2.errors import UserError
from momentum2.norms import LocalBatchNorm, MomentumBatchNorm, convert_norms
from momentum2.reproduce import command, stability_page
from momentum2.reproduce.command import ReproduceOptions
from momentum2.reproduce.stability import Instrument, Stability, aged, decompose, draw_targets, measure, probe

POOL, CHANNELS, DRAWS = 512, 32, 6
#: So large that the variance of a batch counts for nothing: the output is (x − mean) / √LARGE.
LARGE = 1e8


def gaussian(mean: float = 0.0) -> Tensor:
    return torch.randn(POOL, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + mean


def orders() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(POOL, generator=generator) for _ in range(DRAWS)])


def network(eps: float = LARGE) -> nn.Module:
    return nn.Sequential(MomentumBatchNorm(CHANNELS, eps=eps, affine=False).double())


def found(samples: int, alpha: float, shifts: list[float]) -> Stability:
    """The variances of x − mean, where the means of the histories are off by these."""
    x = gaussian()
    mean = x.mean(0) + torch.tensor(shifts, dtype=torch.float64)[:, None]
    z, devices = draw_targets(network(), x, orders(), samples, alpha, [(mean, torch.ones_like(mean))])
    return decompose(z * math.sqrt(LARGE), x - x.mean(0), devices)


@pytest.mark.parametrize("samples", [2, 4, 8, 32])
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.1])
def test_noise_is_that_of_the_mean_of_companions(samples: int, alpha: float):
    """α·mean of n with one of them fixed: variance α²(n−1)/n² · S², drawn from N−1 others without replacement."""
    measured = found(samples, alpha, shifts=[0.0])
    variance = gaussian().var(0).sum().item()
    drawn = (POOL - samples) / (POOL - 1)
    assert measured.noise == pytest.approx(alpha**2 * (samples - 1) / samples**2 * variance * drawn, rel=0.03)
    assert measured.history == 0.0
    # In the mean over companions an image is still compared with itself: α/n of it is missing.
    missing = alpha / samples * drawn
    assert measured.bias == pytest.approx(missing**2 * variance, rel=0.05, abs=1e-4 * variance)
    assert measured.signal == pytest.approx((1 - missing) ** 2 * variance, rel=0.02)


def test_with_the_history_alone_there_is_no_noise_and_the_signal_is_that_of_the_images():
    measured = found(4, 0.0, shifts=[0.0])
    assert measured.noise == pytest.approx(0, abs=1e-9)
    assert measured.bias == pytest.approx(0, abs=1e-9)
    assert measured.signal == pytest.approx(gaussian().var(0).sum().item(), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_a_history_that_is_wrong_everywhere_is_a_bias(alpha: float):
    measured = found(16, alpha, shifts=[0.5] * 4)
    own = (alpha / 16) ** 2 * gaussian().var(0).sum().item()
    assert measured.bias == pytest.approx((1 - alpha) ** 2 * 0.25 * CHANNELS + own, rel=0.02)
    assert measured.history == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_histories_that_differ_between_devices_are_neither_noise_nor_bias(alpha: float):
    """Means ±δ and 0 of three devices: their variance is δ², what they have in common is right."""
    measured = found(2, alpha, shifts=[0.5, 0.0, -0.5])
    alone = found(2, alpha, shifts=[0.0])
    assert measured.history == pytest.approx((1 - alpha) ** 2 * 0.25 * CHANNELS, rel=0.03)
    assert measured.noise == pytest.approx(alone.noise, rel=0.05, abs=1e-9)
    # Of three, two that differ have the product −δ²/3 in the mean: the estimate is that of many devices.
    assert measured.bias - alone.bias == pytest.approx(
        -((1 - alpha) ** 2) * 0.25 / 3 * CHANNELS, rel=0.1, abs=0.02
    )
    assert measured.signal == pytest.approx(alone.signal, rel=0.03)


def test_error_is_the_sum_of_its_parts():
    x = gaussian()
    mean = x.mean(0) + 0.3 * torch.randn(
        8, CHANNELS, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    z, devices = draw_targets(network(), x, orders(), 4, 0.3, [(mean, torch.ones_like(mean))])
    z, full = z * math.sqrt(LARGE), x - x.mean(0)
    parts = decompose(z, full, devices)
    assert parts.noise + parts.history + parts.bias == pytest.approx(
        (z - full).square().sum(2).mean().item(), rel=0.02
    )


@pytest.mark.parametrize("samples", [4, 32])
def test_noise_of_unit_vectors_is_that_of_fresh_companions(samples: int):
    """Local BN with its variance, then unit length: no closed form, so companions are drawn from the Gaussian."""
    x, net = gaussian(2.0), network(eps=1e-5)
    full = torch.nn.functional.normalize((x - x.mean(0)) / x.std(0, correction=0), dim=1)
    measured = measure(net, x, full, orders(), samples)

    generator = torch.Generator().manual_seed(3)
    batches = torch.randn(40, 100, samples, CHANNELS, dtype=torch.float64, generator=generator) + 2.0
    batches[:, :, 0] = x[:40, None]  # the same image, other companions
    batches = (batches - batches.mean(2, keepdim=True)) / (
        batches.var(2, correction=0, keepdim=True) + 1e-5
    ).sqrt()
    z = torch.nn.functional.normalize(batches[:, :, 0], dim=2)
    noise = z.var(1).sum(1).mean().item()
    assert measured["noise"] == pytest.approx(noise, rel=0.08)
    assert 0 < measured["errors"]["noise"] < 0.1 * measured["noise"] / measured["signal"]


def test_alpha_1_is_local_bn_and_a_probe_leaves_the_network_as_it_was():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    images = torch.rand(16, 3, 6, 6)
    local = nn.Sequential(*net)
    convert_norms(local, "local", devices=4)
    assert isinstance(local[1], LocalBatchNorm)
    probing = probe(net, 4)
    z = probing(images)
    assert torch.equal(z, local.train()(images))
    # One device after the other, in whatever order: a device's samples are a set.
    turned = torch.arange(16).view(4, 4).flip(1).flatten()
    torch.testing.assert_close(probing(images[turned])[turned], z)
    assert probing[0].weight is net[0].weight
    convert_norms(net, "momentum", 2)
    norm = net[1]
    assert isinstance(norm, MomentumBatchNorm)
    norm.set_histories(torch.rand(2, 8), torch.rand(2, 8))
    before = {name: tensor.clone() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}
    z, devices = draw_targets(net, images, torch.arange(16)[None], 4, 0.5, [norm.histories()])
    assert devices is not None
    assert devices[0].tolist() == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_age_of_a_history_is_a_closed_form():
    age = 0.0
    for _ in range(400):
        age = aged(age, 0.05)
    assert age == pytest.approx(1 / 0.05)  # the batch that is used has no age: (1−α)/α in a target
    age = 0.0
    for t in range(9):  # the plain mean of nine batches, one to nine steps old
        age = aged(age, 1 / (t + 1))
    assert age == pytest.approx(5)


#: Two steps of the smoke scale, in seconds.
TINY = Instrument((0.1,), (0.5,), (2, 4), window=2, pool=128, reference=128, draws=3)

#: Measures seeds 0 and 1 like that, but stands still in the training of seed 1.
STANDS_STILL = """
import signal, sys
from pathlib import Path
from momentum2.cli import main
from momentum2.methods.method import Method
from momentum2.reproduce import command, stability_page
from momentum2.reproduce.command import ReproduceOptions
from momentum2.reproduce.stability import Instrument

def begin(method, k, begin=Method.before_step):
    if list(Path(sys.argv[1]).glob("stability/seed-0.json")):
        Path(__file__).with_name("training").touch()
        signal.pause()
    begin(method, k)

Method.before_step = begin
command.INSTRUMENTS["smoke"] = Instrument(**INSTRUMENT)
main(["reproduce", "stability", "--seeds", "0,1", "--out", sys.argv[1]])
"""


@pytest.mark.slow
def test_a_killed_command_goes_on_with_the_seed_that_is_missing(tmp_path: Path, monkeypatch, capsys):
    out, program = tmp_path / "out", tmp_path / "stands_still.py"
    program.write_text(STANDS_STILL.replace("INSTRUMENT)", f"{asdict(TINY)})"))
    words = [sys.executable, str(program), str(out)]
    with subprocess.Popen(words, env=dict(os.environ, OMP_NUM_THREADS="1")) as first:
        while not (tmp_path / "training").exists():
            assert first.poll() is None, "It has ended before."
            time.sleep(0.05)
        first.kill()
    before = (out / "stability" / "seed-0.json").stat().st_mtime_ns
    assert "| BN |" in (out / "stability.md").read_text()  # of the seed that is finished
    assert not (out / "stability" / "seed-1.json").exists()

    monkeypatch.setitem(command.INSTRUMENTS, "smoke", TINY)
    assert main(["reproduce", "stability", "--seeds", "0,1", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "seed 0 was finished before" in said
    assert "± is the standard deviation over seeds." in said
    assert (out / "stability" / "seed-0.json").stat().st_mtime_ns == before
    found = json.loads((out / "stability.json").read_text())
    assert [seed["seed"] for seed in found["seeds"]] == [0, 1]
    assert found["settings"]["instrument"]["pool"] == 128
    assert found["seeds"][0]["environment"]["torch"] == torch.__version__
    assert (out / "stability.md").read_text().strip() in said
    for name in ("alpha", "samples"):
        assert (out / f"stability-{name}.svg").read_text().startswith("<?xml")

    points = {(p["norm"], p["alpha"], p["samples"]): p for p in found["points"]}
    assert [*points] == [
        ("local", 1.0, 2),
        ("local", 1.0, 4),
        ("momentum", 0.5, 2),
        ("momentum", 0.5, 4),
        ("synced", 1.0, 64),
        ("ema", 0.0, None),
        ("scheduled", pytest.approx((1 + math.cos(math.pi / 10)) / 2, rel=1e-3), 4),
    ]
    first_seed, second = (
        p["noise"] / p["signal"]
        for p in (next(p for p in seed["points"] if p["norm"] == "local") for seed in found["seeds"])
    )
    noise = [point["mean"]["noise"] for point in points.values()]
    assert noise[0] == pytest.approx((first_seed + second) / 2, rel=1e-3)
    std = points["local", 1.0, 2]["std"]["noise"]
    assert std == pytest.approx(abs(first_seed - second) / 2**0.5, abs=1e-3 * noise[0])
    assert noise[0] > noise[1] > noise[4] > 0  # 2, 4 and 64 samples
    assert noise[0] > noise[2] > noise[3] > 0  # α = 1 and 0.5
    assert noise[5] == 0
    assert points["ema", 0.0, None]["mean"]["bias"] > points["synced", 1.0, 64]["mean"]["bias"] > 0
    assert points["momentum", 0.5, 4]["age"] == pytest.approx(0.5 * 1.5)  # the mean of two commits

    monkeypatch.setitem(command.INSTRUMENTS, "smoke", replace(TINY, draws=4))
    assert main(["reproduce", "stability", "--out", str(out)]) == 2
    assert "was measured with other settings" in capsys.readouterr().err
    # Before anything is trained, and whatever seed it is.
    monkeypatch.setattr(stability_page, "run_seed", None)
    assert main(["reproduce", "stability", "--seeds", "5", "--out", str(out)]) == 2
    assert "seed-0.json, which was measured with other settings" in capsys.readouterr().err
    for damaged in ("[]", json.dumps({**found["seeds"][0], "points": None})):
        (out / "stability" / "seed-0.json").write_text(damaged)
        assert main(["reproduce", "stability", "--out", str(out)]) == 2
        assert "is not a result of stability" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--scale", "paper"], "--scale paper is not for stability"),
        (["--rows", "local-local"], "--rows does not apply to stability"),
        (["--samples", "4"], "--samples does not apply to stability"),
        (["--jobs", "2"], "--jobs does not apply to stability"),
        (["--launcher", "torchrun"], "--launcher does not apply to stability"),
        (["--detection-data", "."], "--detection_data does not apply to stability"),
        (["--dry-run"], "--dry_run does not apply to stability"),
        (["--data", "."], "--data does not apply to scale smoke"),
        (["--seeds", "one"], "--seeds takes whole numbers"),
        (["--loss", "other"], "--loss"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--scale", "cifar"], "--data is required"),
        (["--scale", "cifar", "--data", "nowhere"], "--data nowhere is not a folder"),
        (["--scale", "cifar", "--data", "."], "--data . contains no images"),
        (["--out", "/dev/null/x"], "--out /dev/null/x cannot be created"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "stability", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_few_images_are_refused(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setitem(command.INSTRUMENTS, "smoke", replace(TINY, reference=2048))
    assert main(["reproduce", "stability", "--out", str(tmp_path)]) == 2
    assert "those of 2,048 images, but there are only 1,280." in capsys.readouterr().err


def test_other_images_are_another_study(tmp_path: Path):
    for folder, names in {"a": ("1", "2"), "copy": ("1", "2"), "b": ("1", "3")}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            Image.new("RGB", (8, 8)).save(tmp_path / folder / f"{name}.png")
    a, same, b = (
        command.find_study(ReproduceOptions(scale="cifar", data=str(tmp_path / folder))).settings
        for folder in ("a", "copy", "b")
    )
    assert a == same
    assert a != b
    assert str(tmp_path) not in json.dumps(a)


def test_a_collapsed_teacher_is_named():
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    nn.init.zeros_(network[2].weight)
    images, orders = torch.randn(16, 4), torch.stack([torch.randperm(16) for _ in range(3)])
    full = F.normalize(network(images).double(), dim=1).detach()
    with torch.no_grad(), pytest.raises(UserError, match="collapsed"):
        measure(network, images, full, orders, 4)
