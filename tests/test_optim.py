"""LARS against the update written out in float64; the groups of parameters."""

import numpy as np
import pytest
import torch
from torch import nn

from momentum2.config import OptimConfig
from momentum2.optim import LARS, build_optimizer, set_lr


def test_lars_is_the_written_update():
    rng = np.random.default_rng(0)
    lr, momentum, decay, eta = 0.7, 0.9, 1e-2, 1e-3
    w = {name: rng.normal(size=shape) for name, shape in (("matrix", (4, 3)), ("kernel", (2, 3, 3, 3)), ("bias", (5,)))}
    parameters = {name: nn.Parameter(torch.tensor(value)) for name, value in w.items()}
    groups = [
        {"params": [parameters["matrix"], parameters["kernel"]], "weight_decay": decay, "adapt": True},
        {"params": [parameters["bias"]], "weight_decay": 0.0, "adapt": False},
    ]
    optimizer = LARS(groups, lr, momentum, decay, eta)
    v = {name: np.zeros_like(value) for name, value in w.items()}
    for _ in range(5):
        for name, parameter in parameters.items():
            g = rng.normal(size=w[name].shape)
            parameter.grad = torch.tensor(g)
            if name != "bias":
                g = g + decay * w[name]
                g = g * eta * np.linalg.norm(w[name]) / np.linalg.norm(g)
            v[name] = momentum * v[name] + g
            w[name] = w[name] - lr * v[name]
        optimizer.step()
        for name, parameter in parameters.items():
            np.testing.assert_allclose(parameter.detach().numpy(), w[name], rtol=1e-12)


def test_lars_survives_zero_norms():
    still, zero = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(2, 2))
    optimizer = LARS([{"params": [still, zero]}], lr=1.0)
    still.grad, zero.grad = torch.zeros(2, 2), torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(2, 2))
    assert torch.equal(zero.detach(), -torch.ones(2, 2))


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_bias_and_norm_are_excluded_on_request(name: str):
    net = network()
    config = OptimConfig(name, weight_decay=0.1, exclude_bias_and_norm=True)
    groups = build_optimizer(net.named_parameters(), config, lr=1.0).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(net[0].weight), id(net[3].weight)}
    assert all(bool(group["weight_decay"]) == group["adapt"] for group in groups)
    everything = build_optimizer(net.named_parameters(), OptimConfig(name, weight_decay=0.1), lr=1.0).param_groups
    assert len(everything) == 1


def test_constant_lr_and_frozen_parameters():
    net = network()
    net[0].requires_grad_(False)
    optimizer = build_optimizer(net.named_parameters(), OptimConfig(), lr=2.0, constant_lr=("3.",))
    set_lr(optimizer, 0.5)
    lrs = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert lrs == {id(p): 2.0 if name.startswith("3.") else 0.5 for name, p in net.named_parameters() if name[0] != "0"}


def test_sgd_is_torchs_own_arithmetic():
    torch.manual_seed(0)
    net, twin = network(), network()
    twin.load_state_dict(net.state_dict())
    ours = build_optimizer(net.named_parameters(), OptimConfig(weight_decay=1e-2), lr=0.1)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for _ in range(3):
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
