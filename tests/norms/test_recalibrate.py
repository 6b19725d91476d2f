"""Recalibrated statistics are those of all values that passed, against float64 sums over all of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2.errors import UserError
from momentum2.norms.recalibrate import recalibrate


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Conv2d(4, 5, 1),
        nn.BatchNorm2d(5),
    )


def batches(*sizes: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [3 * torch.randn(n, 3, 6, 6) + i for i, n in enumerate(sizes)]


def moments(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    values = torch.cat([part.double().movedim(1, 0).flatten(1) for part in parts], 1)  # (c, all values)
    mean = values.mean(1)
    return mean, ((values - mean[:, None]) ** 2).mean(1)


def test_statistics_are_those_of_the_whole_pass(network: nn.Sequential):
    data = batches(8, 8, 3)
    first, second = [], []
    for batch in data:  # the definition: every norm uses its batch's own statistics
        x = F.conv2d(batch, network[0].weight, network[0].bias)
        first.append(x)
        x = F.relu(F.batch_norm(x, None, None, network[1].weight, network[1].bias, training=True))
        second.append(F.conv2d(x, network[4].weight, network[4].bias))
    recalibrate(network, data)
    for norm, parts in ((network[1], first), (network[5], second)):
        mean, var = moments(parts)
        torch.testing.assert_close(norm.running_mean.double(), mean, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(norm.running_var.double(), var, atol=1e-6, rtol=1e-6)
        assert norm.num_batches_tracked == 3


def test_after_one_batch_evaluation_gives_what_training_gave(network: nn.Sequential):
    (batch,) = batches(8)
    network[2].p = 0.0
    expected = network.train()(batch)
    recalibrate(network, [batch])
    torch.testing.assert_close(network.eval()(batch), expected, atol=1e-5, rtol=1e-5)


def test_all_else_stays_as_it_was(network: nn.Sequential):
    network.train()
    network[1].eval()
    modes = [m.training for m in network.modules()]
    weights = [p.clone() for p in network.parameters()]
    data = batches(4, 4)
    random = torch.get_rng_state()
    recalibrate(network, data)
    assert [m.training for m in network.modules()] == modes
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), random)  # no dropout took place
    assert all(p.grad is None for p in network.parameters())
    assert not any(m._forward_pre_hooks for m in network.modules())


def test_order_does_not_matter(network: nn.Sequential):
    data = batches(8, 3, 5)
    recalibrate(network, data)
    forward = [b.clone() for b in network.buffers()]
    recalibrate(network, data[::-1])
    for a, b in zip(forward, network.buffers(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_no_images(network: nn.Sequential):
    with pytest.raises(UserError, match="no images"):
        recalibrate(network, [])
