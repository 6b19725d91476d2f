"""Heads, layer by layer, and what their norms promise."""

import torch
from torch import nn

from momentum2 import heads


def kinds(head: nn.Sequential) -> list[str]:
    return [type(layer).__name__ for layer in head]


def test_mlp_is_linear_bn_relu_linear() -> None:
    head = heads.mlp(7, 20, 5)
    assert kinds(head) == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert [tuple(p.shape) for p in head.parameters()] == [(20, 7), (20,), (20,), (20,), (5, 20), (5,)]
    x = torch.randn(6, 7)
    h = x @ head[0].weight.T + head[0].bias
    h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
    expected = h.clamp(min=0) @ head[3].weight.T + head[3].bias
    torch.testing.assert_close(head(x), expected)


def test_mlp_without_norm_treats_samples_apart() -> None:
    head = heads.mlp(7, 20, 5, norm=False)
    assert kinds(head) == ["Linear", "ReLU", "Linear"]
    x = torch.randn(6, 7)
    torch.testing.assert_close(head(x)[:1], head(x[:1]))


def test_simsiam_projector_ends_normalized() -> None:
    head = heads.simsiam_projector(7, 20, 5)
    assert kinds(head) == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear", "BatchNorm1d"]
    assert [tuple(p.shape) for p in head.parameters()] == [
        *[(20, 7), (20,), (20,)],
        *[(20, 20), (20,), (20,)],
        (5, 20),  # no bias before, no scale after
    ]
    z = head(torch.randn(64, 7))
    torch.testing.assert_close(z.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.var(0, unbiased=False), torch.ones(5), atol=1e-2, rtol=0)


def test_simclr_projector_has_two_layers_and_a_last_scale() -> None:
    head = heads.simclr_projector(7, 20, 5)
    assert kinds(head) == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    trained = [tuple(p.shape) for p in head.parameters() if p.requires_grad]
    assert trained == [(20, 7), (20,), (20,), (5, 20), (5,)]  # no bias of a Linear, nor of the last BN
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    with torch.no_grad():
        head[4].weight.copy_(scale)
    z = head(torch.randn(64, 7))
    z.square().sum().backward()
    assert head[4].bias.grad is None
    torch.testing.assert_close(z.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(z.std(0, unbiased=False), scale, atol=1e-2, rtol=1e-2)


def test_classifier_without_norm_is_linear() -> None:
    head = heads.classifier(7, 4, norm=False)
    assert kinds(head) == ["Linear"]
    x = torch.randn(6, 7)
    torch.testing.assert_close(head(x), x @ head[0].weight.T)


def test_classifier_starts_small() -> None:
    linear = heads.classifier(500, 100)[0]
    assert not linear.bias.any()
    assert abs(linear.weight.mean().item()) < 2e-4
    assert 0.0098 < linear.weight.std().item() < 0.0102


def test_classifier_normalizes_its_logits() -> None:
    head = heads.classifier(7, 4)
    assert kinds(head) == ["Linear", "BatchNorm1d"]
    logits = head(100 * torch.randn(64, 7) + 30)
    assert logits.shape == (64, 4)
    torch.testing.assert_close(logits.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(logits.var(0, unbiased=False), torch.ones(4), atol=1e-2, rtol=0)
