"""Shuffling BN in a single process; tests/distributed has several."""

import torch
from torch import nn

from momentum2 import LocalBatchNorm, shuffled

N, DEVICES = 16, 4


def split_norm():
    torch.manual_seed(0)
    return LocalBatchNorm(3, devices=DEVICES)


def test_keeps_the_order_of_a_network_without_norms():
    x = torch.randn(N, 3)
    linear = nn.Linear(3, 2)
    y = shuffled(linear, x, torch.Generator().manual_seed(0))
    torch.testing.assert_close(y, linear(x))


def test_each_virtual_device_sees_its_part_of_the_permutation():
    x = torch.randn(N, 3)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    y = shuffled(split_norm(), x, order)
    expected = torch.empty_like(x)
    for part in order.chunk(DEVICES):
        expected[part] = nn.functional.batch_norm(x[part], None, None, training=True)
    torch.testing.assert_close(y, expected)
    assert not torch.allclose(y, split_norm()(x), atol=1e-2)


def test_is_a_function_of_the_generators_state():
    x = torch.randn(N, 3)
    one, again, other = (shuffled(split_norm(), x, torch.Generator().manual_seed(s)) for s in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
