"""DINO's parts and whole steps against its formulas, written out in plain torch and fp64."""

import copy
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from momentum2.api import pretrain
from momentum2.backbones import build
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
from momentum2.errors import SettingError
from momentum2.methods import DINO
from momentum2.methods.dino import dino_projector
from momentum2.schedules import Schedule
from momentum2.training.checks import check

SCHEDULE = Schedule(K=10, lr_base=0.1, m_base=0.4, alpha_base=0.8)
PROTOTYPES = 12


def make(**method: object) -> DINO:
    """A DINO in fp64 in the middle of its training: teacher and student differ, and the center is not 0."""
    config = Config(
        method=MethodConfig("dino", **method),
        model=ModelConfig(projector_hidden=16, projector_out=PROTOTYPES),
    )
    torch.manual_seed(0)
    made = DINO(config, SCHEDULE, build("resnet18", "small", 0.125), 1, 0).double().train()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * p.std().nan_to_num(1.0) * torch.randn_like(p) + 0.05 * torch.randn_like(p))
        made.center.normal_(std=0.1)
    return made


def views(count: int = 2, n: int = 4, seed: int = 1) -> list[Tensor]:
    """Images of their own for each view, the third and later ones small."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [16, 16] + [8] * (count - 2)
    return [
        torch.randn(n, 3, size, size, generator=generator, dtype=torch.float64) * (1 + i)
        for i, size in enumerate(sizes)
    ]


def cross_entropy(t: Tensor, s: Tensor, center: Tensor, teacher: float, student: float) -> Tensor:
    """H(softmax((t − c)/τ_t), softmax(s/τ_s)), mean over the rows, one number at a time."""
    rows = []
    for a, b in zip(t, s, strict=True):
        a, b = ((a - center) / teacher).exp(), (b / student).exp()
        p, q = a / a.sum(), b / b.sum()
        rows.append(-sum(p[i] * q[i].log() for i in range(PROTOTYPES)))
    return torch.stack(rows).mean()


@pytest.mark.parametrize("norm", [False, True])
def test_the_projector_is_an_mlp_and_cosines_to_prototypes(norm: bool):
    torch.manual_seed(0)
    g = dino_projector(7, 20, 5, norm).double()
    kinds = ["Linear", "BatchNorm1d", "GELU"] if norm else ["Linear", "GELU"]
    assert [type(layer).__name__ for layer in g.mlp] == [*kinds, *kinds, "Linear"]
    first, second, third = (layer for layer in g.mlp if isinstance(layer, nn.Linear))
    shapes = [tuple(layer.weight.shape) for layer in (first, second, third, g.prototypes)]
    assert shapes == [(20, 7), (20, 20), (256, 20), (5, 256)]
    assert g.prototypes.bias is None
    for layer in (first, second, third):
        assert not layer.bias.any()
        nn.init.normal_(layer.bias)
    x = torch.randn(6, 7, dtype=torch.float64)
    h = x
    for layer in (first, second):
        h = h @ layer.weight.T + layer.bias
        if norm:
            h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt()
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
    h = h @ third.weight.T + third.bias
    cosines = [torch.stack([a @ w / (a.norm() * w.norm()) for w in g.prototypes.weight]) for a in h]
    torch.testing.assert_close(g(x), torch.stack(cosines))


def test_the_projector_starts_as_dinos():
    torch.manual_seed(0)
    g = dino_projector(500, 400, 300, norm=False)
    for layer in (g.mlp[0], g.mlp[2], g.mlp[4]):
        assert 0.0198 < layer.weight.std() < 0.0202
    assert 0.98 / 16 < g.prototypes.weight.abs().max() <= 1 / 16  # uniform, as nn.Linear's


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("norm", ["local", "momentum", "ema"])
def test_the_loss_is_the_mean_over_pairs_of_different_views(count: int, norm: str):
    method = make(
        teacher_norm=norm,
        temperature=0.02,
        teacher_temperature_start=0.1,
        teacher_temperature=0.2,
        teacher_temperature_warmup=0.8,
        projector_norm=True,
    )
    method.before_step(2)  # of 8 steps of warm-up
    x = views(count)
    student, teacher = copy.deepcopy(method.student), copy.deepcopy(method.teacher)
    t, s = [teacher.network(v) for v in x[:2]], [student(v) for v in x]
    pairs = [(i, j) for i in range(2) for j in range(count) if i != j]
    assert len(pairs) == 2 * count - 2
    terms = [cross_entropy(t[i], s[j], method.center, 0.125, 0.02) for i, j in pairs]
    output = method(x, None)
    torch.testing.assert_close(output.loss, torch.stack(terms).mean())
    p = ((t[0] - method.center) / 0.125).exp()
    torch.testing.assert_close(output.z, p / p.sum(1, keepdim=True))
    own = [cross_entropy(t[i], s[i], method.center, 0.125, 0.02) for i in range(2)]
    assert abs(torch.stack(terms + own).mean() - output.loss) > 1e-5  # a view's own target is told apart
    entropy = [cross_entropy(z, 0.02 * (z - method.center) / 0.125, method.center, 0.125, 0.02) for z in t]
    torch.testing.assert_close(output.metrics["teacher_entropy"], torch.stack(entropy).mean())


def test_the_gradient_reaches_the_student_alone():
    method, x = make(temperature=0.3, teacher_temperature=0.2, freeze_last_layer=0.0), views(3)
    method.before_step(0)
    student = copy.deepcopy(method.student)
    t = [copy.deepcopy(method.teacher).network(v).detach() for v in x[:2]]
    s = [student(v) for v in x]
    pairs = [(0, 1), (1, 0), (0, 2), (1, 2)]
    torch.stack([cross_entropy(t[i], s[j], method.center, 0.2, 0.3) for i, j in pairs]).mean().backward()
    method(x, None).loss.backward()
    for (name, p), q in zip(method.student.named_parameters(), student.parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9, msg=name)
    assert not any(p.requires_grad or p.grad is not None for p in method.teacher.parameters())
    assert not method.center.requires_grad


@pytest.mark.parametrize("norm", ["local", "synced", "momentum", "ema"])
def test_the_center_moves_once_a_step_by_the_mean_of_all_outputs(norm: str):
    method = make(teacher_norm=norm, center_momentum=0.7)
    center = method.center.clone()
    for k in range(3):
        method.before_step(k)
        teacher, rows = copy.deepcopy(method.teacher), []
        for i in range(2):
            x = views(3, seed=10 * k + i)
            rows += [*teacher.network(x[0]), *teacher.network(x[1])]
            method.keep(method(x, None))
            assert torch.equal(method.center, center)  # only after the step
        method.after_step(k)
        assert len(rows) == 2 * 2 * 4
        expected = 0.7 * center + 0.3 * torch.stack(rows).mean(0)
        torch.testing.assert_close(method.center, expected)
        center = method.center.clone()
        assert method.means == []


def test_the_center_does_not_depend_on_the_number_of_micro_batches():
    """EMAN's teacher, whose outputs depend on their own images alone."""
    centers = []
    for count in (1, 2, 4):
        method = make(teacher_norm="ema")
        method.before_step(0)
        for parts in zip(*(v.chunk(count) for v in views(n=8)), strict=True):
            method.keep(method(list(parts), None))
        method.after_step(0)
        centers.append(method.center)
    for center in centers[1:]:
        torch.testing.assert_close(center, centers[0])


def test_the_teachers_temperature_warms_up_linearly():
    method = make(teacher_temperature_start=0.04, teacher_temperature=0.07, teacher_temperature_warmup=0.3)
    used = []
    for k in range(6):
        method.before_step(k)
        used.append(float(method.teacher_temperature))
        assert method.watch(k)["teacher_temperature"] == pytest.approx(used[-1])
    assert used == pytest.approx([0.04, 0.05, 0.06, 0.07, 0.07, 0.07])
    plain = make(teacher_temperature_start=0.02, teacher_temperature=0.05)  # without a warm-up
    plain.before_step(0)
    assert float(plain.teacher_temperature) == pytest.approx(0.05)


def test_the_last_layer_waits():
    """Its prototypes have no gradient in the first three of ten steps; decay may shorten them, not turn them."""
    method = make(freeze_last_layer=0.3)
    optimizer = torch.optim.SGD(method.student.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    w, turned, mlp = method.student.projector.prototypes.weight, [], method.student.projector.mlp[0].weight
    for k in range(5):
        before, other = w.detach().clone(), mlp.detach().clone()
        method.before_step(k)
        output = method(views(seed=k), None)
        output.loss.backward()
        method.keep(output)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(k)
        turned.append(bool((torch.cosine_similarity(w, before) < 1 - 1e-9).all()))
        assert not torch.equal(mlp, other)
    assert turned == [False, False, False, True, True]


def test_one_view_is_too_few():
    with pytest.raises(SettingError, match="DINO takes at least 2 views"):
        check(Config(method=MethodConfig("dino"), views=ViewsConfig("supervised")), DINO)


@pytest.mark.parametrize("norm", ["local", "momentum"])
def test_a_resumed_run_has_the_same_bits(norm: str, tmp_path: Path):
    """The center is in the checkpoints: a run that lost its last steps makes them again."""
    config = Config(
        method=MethodConfig(
            "dino", teacher_norm=norm, teacher_temperature=0.07, teacher_temperature_warmup=0.75
        ),
        model=ModelConfig("resnet18", "small", width=0.125, projector_hidden=16, projector_out=PROTOTYPES),
        data=DataConfig("shapes", image_size=16, train_size=32, cache="off"),
        views=ViewsConfig("multicrop", small_crops=2, small_size=8),
        train=TrainConfig(
            steps=4, batch_size=8, accumulate=2, threads=1, precision="fp32", device="cpu", checkpoint_every=2
        ),
        optim=OptimConfig(lr=1.0),
        monitor=MonitorConfig(report=False),
    )
    assert pretrain(config, tmp_path / "whole").finished
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000004")
    assert pretrain(config, tmp_path / "cut").finished
    whole, cut, middle = (
        load_file(tmp_path / run / "checkpoints" / step / "shared.safetensors")
        for run, step in (("whole", "step-00000004"), ("cut", "step-00000004"), ("cut", "step-00000002"))
    )
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert middle["method/center"].any()
    assert not torch.equal(middle["method/center"], whole["method/center"])
