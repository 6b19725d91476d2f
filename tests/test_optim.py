"""Optimizers against updates written out in float64; the groups of parameters; resuming."""

import numpy as np
import pytest
import torch
from torch import nn

from momentum2 import backbones
from momentum2.config import OptimConfig
from momentum2.errors import SettingError
from momentum2.muon import orthogonalized
from momentum2.optim import LARS, STATES, build_optimizer, set_lr, set_weight_decay
from momentum2.schedules import cosine_between

LRS = [0.5, 0.3, 0.0, 0.2, 0.1]


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def by_hand(config: OptimConfig, weights: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]]):
    """One parameter at a time, plain numpy: (weights, velocities) after the given gradients."""
    w = {name: value.copy() for name, value in weights.items()}
    v = {name: np.zeros_like(value) for name, value in weights.items()}
    done: dict[str, list[np.ndarray]] = {name: [] for name in weights}
    for lr, step in zip(LRS, gradients, strict=True):
        for name, g in step.items():
            excluded = config.exclude_bias_and_norm and w[name].ndim == 1
            decay = 0.0 if excluded else config.weight_decay
            update = g + decay * w[name]
            if config.name == "adamw":
                k = len(done[name]) + 1
                done[name].append(g)
                m = sum(0.1 * 0.9 ** (k - 1 - i) * x for i, x in enumerate(done[name])) / (1 - 0.9**k)
                u = sum(0.001 * 0.999 ** (k - 1 - i) * x**2 for i, x in enumerate(done[name])) / (
                    1 - 0.999**k
                )
                w[name] = w[name] * (1 - lr * decay) - lr * m / (np.sqrt(u) + 1e-8)
                continue
            if config.name == "sgd":
                v[name] = config.sgd_momentum * v[name] + update
                ahead = update + config.sgd_momentum * v[name] if config.nesterov else v[name]
                w[name] = w[name] - lr * ahead
                continue
            norm_w, norm_g = np.sqrt((w[name] ** 2).sum()), np.sqrt((g**2).sum())
            trust = 1.0
            if not excluded and norm_w > 0 and norm_g > 0:
                trust = config.lars_eta * norm_w / (norm_g + decay * norm_w)
            v[name] = config.sgd_momentum * v[name] + lr * trust * update
            w[name] = w[name] - v[name]
    return w, v


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("name", ["sgd", "nesterov", "lars", "adamw"])
def test_steps_equal_the_update_by_hand(name: str, exclude: bool) -> None:
    config = OptimConfig(
        "sgd" if name == "nesterov" else name,
        weight_decay=0.1,
        lars_eta=0.02,
        exclude_bias_and_norm=exclude,
        nesterov=name == "nesterov",
    )
    net = network().double().to(memory_format=torch.channels_last)
    start = {n: p.detach().numpy().copy() for n, p in net.named_parameters()}
    rng = np.random.default_rng(1)
    gradients = [{n: rng.normal(size=w.shape) for n, w in start.items()} for _ in LRS]
    gradients[1]["3.weight"][:] = 0  # a gradient of zero, and a weight of zero (BN's bias at the start)
    optimizer = build_optimizer(net.named_parameters(), config, LRS[0])
    for lr, step in zip(LRS, gradients, strict=True):
        set_lr(optimizer, lr)
        for n, p in net.named_parameters():
            p.grad = torch.from_numpy(step[n].copy())  # torch may write into it
        optimizer.step()
    weights, velocities = by_hand(config, start, gradients)
    for n, p in net.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), weights[n], rtol=1e-12, atol=1e-13, err_msg=n)
        if name == "adamw":
            assert len([t for t in optimizer.state[p].values() if t.dim()]) == STATES[name] == 2
            continue
        buffer = optimizer.state[p]["momentum_buffer"]
        np.testing.assert_allclose(buffer.numpy(), velocities[n], rtol=1e-12, atol=1e-13, err_msg=n)


def test_lars_survives_zero_norms():
    still, zero = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizer = LARS([{"params": [still, zero]}], lr=1.0)
    still.grad, zero.grad = torch.zeros(2, 2), torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(2, 2))
    assert torch.equal(zero.detach(), -torch.ones(2, 2))


@pytest.mark.parametrize("shape", [(24, 27), (48, 16), (10, 10), (12, 108)])
def test_orthogonalized_against_the_singular_value_decomposition(shape: tuple[int, int]):
    """The same singular vectors, and all singular values near 1, whatever they were."""
    rng = np.random.default_rng(shape[1])
    u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    values = np.geomspace(0.01, 1, len(v)) * 1e-3
    matrix = torch.from_numpy(u * values @ v)
    for dtype in (torch.float64, torch.float32):
        found = orthogonalized(matrix.to(dtype)).double().numpy()
        diagonal = u.T @ found @ v.T
        assert np.diag(diagonal).min() > 0.7
        assert np.diag(diagonal).max() < 1.2
        np.testing.assert_allclose(diagonal - np.diag(np.diag(diagonal)), 0, atol=1e-3)
        np.testing.assert_allclose(u @ diagonal @ v, found, atol=1e-3)
    assert not orthogonalized(torch.zeros(shape)).any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_steps_equal_the_update_by_hand(nesterov: bool):
    """Matrices by the singular value decomposition, up to what the iteration leaves; vectors as torch's AdamW."""
    config = OptimConfig("muon", weight_decay=0.1, nesterov=nesterov, exclude_bias_and_norm=True)
    net = network().double().to(memory_format=torch.channels_last)
    start = {n: p.detach().clone() for n, p in net.named_parameters()}
    optimizer = build_optimizer(net.named_parameters(), config, LRS[0])
    vectors = {n: nn.Parameter(w.clone()) for n, w in start.items() if w.ndim == 1}
    adamw = torch.optim.AdamW(vectors.values(), lr=1.0, betas=(0.9, 0.99), weight_decay=0.0)
    velocity = {n: np.zeros(w.shape) for n, w in start.items() if w.ndim > 1}
    moved = {n: w.numpy().copy() for n, w in start.items() if w.ndim > 1}
    rng = np.random.default_rng(1)
    for lr in LRS:
        gradients = {n: rng.normal(size=w.shape) for n, w in start.items()}
        set_lr(optimizer, lr)
        adamw.param_groups[0]["lr"] = 0.15 * lr
        for n, p in net.named_parameters():
            p.grad = torch.from_numpy(gradients[n].copy())
            if n in vectors:
                vectors[n].grad = p.grad.clone()
        optimizer.step()
        adamw.step()
        for n, v in velocity.items():
            v[...] = 0.9 * v + gradients[n]
            ahead = (gradients[n] + 0.9 * v if nesterov else v).reshape(len(v), -1)
            u, _, w = np.linalg.svd(ahead, full_matrices=False)
            scale = max(1, ahead.shape[0] / ahead.shape[1]) ** 0.5
            moved[n] = moved[n] * (1 - 0.1 * lr) - lr * scale * (u @ w).reshape(v.shape)
    for n, p in net.named_parameters():
        if n in vectors:
            torch.testing.assert_close(p.detach(), vectors[n].detach(), rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_allclose(p.detach().numpy(), moved[n], atol=0.05 * sum(LRS), err_msg=n)


@pytest.mark.parametrize("name", ["sgd", "lars", "muon"])
def test_bias_and_norm_are_excluded_on_request(name: str):
    net = network()
    config = OptimConfig(name, weight_decay=0.1, exclude_bias_and_norm=True)
    groups = build_optimizer(net.named_parameters(), config, lr=1.0).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(net[0].weight), id(net[3].weight)}
    assert all(bool(group["weight_decay"]) == group["adapt"] for group in groups)
    everything = build_optimizer(
        net.named_parameters(), OptimConfig(name, weight_decay=0.1), lr=1.0
    ).param_groups
    assert len(everything) == 1


def test_constant_lr_and_frozen_parameters():
    net = network()
    net[0].requires_grad_(False)
    optimizer = build_optimizer(net.named_parameters(), OptimConfig(), lr=2.0, constant_lr=("3.",))
    set_lr(optimizer, 0.5)
    lrs = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert lrs == {
        id(p): 2.0 if name.startswith("3.") else 0.5 for name, p in net.named_parameters() if name[0] != "0"
    }


@pytest.mark.parametrize("name", ["sgd", "lars", "muon"])
def test_the_state_is_tensors_of_a_parameter_and_resumes_exactly(name: str) -> None:
    config = OptimConfig(name=name, exclude_bias_and_norm=True)

    def new() -> nn.Module:
        torch.manual_seed(0)
        return network().double().to(memory_format=torch.channels_last)

    def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(net.named_parameters(), config, LRS[0])

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for k in steps:
            set_lr(optimizer, LRS[k])
            x = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()

    whole = new()
    train(whole, optimizer_of(whole), range(5))

    first = new()
    first_optimizer = optimizer_of(first)
    train(first, first_optimizer, range(2))
    saved = {
        (n, key): value.clone(memory_format=torch.contiguous_format)  # as a file would give it back
        for n, p in first.named_parameters()
        for key, value in first_optimizer.state[p].items()
    }
    adamw = {"exp_avg", "exp_avg_sq", "step"} if name == "muon" else set()
    assert {key for _, key in saved} == {"momentum_buffer", *adamw}
    second = new()
    second.load_state_dict(first.state_dict())
    second_optimizer = optimizer_of(second)
    parameters = dict(second.named_parameters())
    for (n, key), value in saved.items():
        assert value.shape == (() if key == "step" else parameters[n].shape)
        second_optimizer.state[parameters[n]][key] = value
    train(second, second_optimizer, range(2, 5))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def groups_of(name: str, config: OptimConfig) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of every parameter of a student with an encoder and a head."""
    student = nn.ModuleDict({"encoder": backbones.build(name), "head": nn.Linear(2, 2)})
    optimizer = build_optimizer(
        student.named_parameters(), config, 1.0, encoder=("encoder", student["encoder"])
    )
    set_lr(optimizer, 1.0)
    names = {id(p): n for n, p in student.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_what_must_not_decay_does_not():
    decayed = OptimConfig("adamw", weight_decay=0.1, exclude_bias_and_norm=True)
    for name in ("timm/test_vit", "timm/test_convnext", "resnet18"):
        found = groups_of(name, decayed)
        shapes = {f"encoder.{n}": p.shape for n, p in backbones.build(name).named_parameters()}
        without = {n for n, (_, decay) in found.items() if decay == 0}
        special = {"encoder.cls_token", "encoder.pos_embed", "encoder.reg_token"} & shapes.keys()
        assert (len(special) >= 2) == (name == "timm/test_vit")
        assert without == {n for n, shape in shapes.items() if len(shape) == 1} | special | {"head.bias"}
    # Names that the network itself excludes are out without being asked for.
    found = groups_of("timm/test_vit", OptimConfig(weight_decay=0.1))
    assert {n for n, (_, decay) in found.items() if decay == 0} >= {"encoder.pos_embed"}
    assert found["encoder.norm.weight"][1] == 0.1


def test_layers_learn_more_slowly_the_nearer_they_are_to_the_image():
    config = OptimConfig("adamw", layer_decay=0.5, encoder_lr=0.1)
    found = {n: lr for n, (lr, _) in groups_of("timm/test_vit", config).items()}
    depth = 1 + max(int(n.split(".")[2]) for n in found if ".blocks." in n)
    assert found["head.weight"] == 1.0
    assert found["encoder.norm.weight"] == pytest.approx(0.1)
    for i in range(depth):  # counted from the last block, to which the norm after it belongs
        assert found[f"encoder.blocks.{i}.attn.qkv.weight"] == pytest.approx(0.1 * 0.5 ** (depth - 1 - i))
    assert found["encoder.pos_embed"] == pytest.approx(0.1 * 0.5**depth)
    assert len({lr for n, (lr, _) in groups_of("timm/test_convnext", config).items()}) > 4
    assert {lr for _, (lr, _) in groups_of("resnet18", OptimConfig(encoder_lr=0.1)).items()} == {0.1, 1.0}
    with pytest.raises(SettingError, match=r"^optim.layer_decay is only for timm networks"):
        groups_of("resnet18", config)


def test_weight_decay_moves_where_there_is_some():
    net = network()
    optimizer = build_optimizer(net.named_parameters(), OptimConfig("adamw", exclude_bias_and_norm=True), 1.0)
    set_weight_decay(optimizer, 0.3)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.3]
    assert [cosine_between(0.04, 0.4, k, 10) for k in (0, 5, 10)] == pytest.approx([0.04, 0.22, 0.4])
