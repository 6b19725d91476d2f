"""Each loss against the formula of its paper, written out with loops in float64."""

import itertools

import numpy as np
import pytest
import torch

from momentum2.methods.byol import contrast, distance
from momentum2.methods.moco import info_nce
from momentum2.methods.simclr import nt_xent
from momentum2.methods.simsiam import D


def unit(*shape: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def cos(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_byol_distance_is_two_minus_two_cosines():
    rng = np.random.default_rng(0)
    q, z = rng.normal(size=(5, 7)), rng.normal(size=(5, 7)) * 3
    expected = np.mean([2 - 2 * cos(a, b) for a, b in zip(q, z, strict=True)])
    # ... which is the squared distance of the unit vectors
    unit_q, unit_z = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, z))
    assert np.isclose(expected, np.mean(((unit_q - unit_z) ** 2).sum(1)))
    assert torch.isclose(
        distance(torch.tensor(q), torch.tensor(z)).double(), torch.tensor(expected), atol=1e-6
    )


def test_info_nce_is_the_log_share_of_the_positive():
    q, k, queue, t = unit(4, 8, seed=1), unit(4, 8, seed=2), unit(16, 8, seed=3), 0.2
    terms = []
    for i in range(4):
        positive = np.exp(q[i] @ k[i] / t)
        negatives = sum(np.exp(q[i] @ n / t) for n in queue)
        terms.append(-np.log(positive / (positive + negatives)))
    result = info_nce(*(torch.tensor(x) for x in (q, k, queue)), t)
    assert np.isclose(result.item(), np.mean(terms), atol=1e-9)


@pytest.mark.parametrize("number", [2, 3, 4])
def test_nt_xent_finds_each_other_view_among_the_outputs_of_other_images(number: int):
    """With two views these are all outputs but the row itself, as in SimCLR."""
    views, t = [unit(5, 8, seed=seed) for seed in range(4, 4 + number)], 0.5
    terms = []
    for v, u in itertools.permutations(range(number), 2):
        for i in range(5):
            positive = np.exp(views[v][i] @ views[u][i] / t)
            negatives = sum(np.exp(views[v][i] @ w[j] / t) for w in views for j in range(5) if j != i)
            terms.append(-np.log(positive / (positive + negatives)))
    assert np.isclose(nt_xent([torch.tensor(v) for v in views], t).item(), np.mean(terms), atol=1e-9)


def test_repulsion_is_the_log_share_of_the_teachers_output():
    """Among the teacher's outputs of the batch and the student's outputs of other images, in both views."""
    rng, t = np.random.default_rng(6), 0.3
    raw = [rng.normal(size=(5, 8)) * scale for scale in (1, 2, 3)]
    q, other, z = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in raw)
    terms = []
    for i in range(5):
        share = sum(np.exp(q[i] @ z[j] / t) for j in range(5))
        share += sum(np.exp(q[i] @ own[j] / t) for own in (q, other) for j in range(5) if j != i)
        terms.append(-np.log(np.exp(q[i] @ z[i] / t) / share))
    student = [torch.tensor(x) for x in raw[:2]]
    result = contrast(student[0], torch.tensor(raw[2]), student, t)
    assert np.isclose(result.item(), np.mean(terms), atol=1e-6)


@pytest.mark.parametrize("name", ["info_nce", "nt_xent", "repulsion"])
def test_similarities_are_not_rounded_to_bf16(name: str):
    """Autocast, which is on for the network, would compute them with three digits."""
    a, b, queue = (torch.from_numpy(unit(8, 16, seed=seed)).float() for seed in range(3))

    def loss() -> torch.Tensor:
        if name == "repulsion":
            return contrast(a, b, [a, queue], 0.1)
        return info_nce(a, b, queue, 0.1) if name == "info_nce" else nt_xent([a, b], 0.1)

    exact = loss()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(), exact)


def test_simsiam_stops_the_gradient_of_z():
    p = torch.randn(6, 4, requires_grad=True)
    z = torch.randn(6, 4, requires_grad=True)
    loss = D(p, z)
    loss.backward()
    expected = -np.mean([cos(a, b) for a, b in zip(p.detach().numpy(), z.detach().numpy(), strict=True)])
    assert np.isclose(loss.item(), expected, atol=1e-6)
    assert z.grad is None
    assert p.grad is not None
