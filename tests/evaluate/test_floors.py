import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.evaluate import floors
from momentum2.evaluate.floors import Patches
from momentum2.evaluate.knn import knn_scores


def noise(n: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed))


def gratings(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stripes at random places: two directions are two classes, and no pixel on its own says which."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    phase, across = 2 * math.pi * torch.rand(n, 1, 1, generator=g), torch.arange(16.0)
    stripes = torch.sin(2 * math.pi * across[None, None] / 5 + phase).expand(n, 16, 16)
    turned = torch.where(labels[:, None, None] == 1, stripes.transpose(1, 2), stripes)
    return turned[:, None].expand(n, 3, 16, 16) + 0.5 * torch.randn(n, 3, 16, 16, generator=g), labels


def test_features_are_those_of_the_formula_patch_by_patch(monkeypatch: pytest.MonkeyPatch):
    """Against NumPy, one patch after another, with filters and a whitening that are made up."""
    rng = np.random.default_rng(0)
    some = rng.normal(size=(40, 108)).astype(np.float32)
    whitening = rng.normal(size=(108, 108)).astype(np.float32) / 10
    filters = rng.normal(size=(5, 108)).astype(np.float32)
    monkeypatch.setattr(floors, "_some_patches", lambda images, generator: torch.from_numpy(some))
    monkeypatch.setattr(floors, "_zca", lambda centered: torch.from_numpy(whitening))
    monkeypatch.setattr(floors, "_spherical_kmeans", lambda x, k, generator: torch.from_numpy(filters))
    images = noise(7, 12)
    encoder = Patches([images], seed=0, filters=4)

    def contrast(p: np.ndarray) -> np.ndarray:
        return (p - p.mean()) / np.sqrt(p.var() + 0.003)

    center = np.mean([contrast(p) for p in some], axis=0)
    rows = []
    for image in images.numpy():
        response = np.zeros((5, 4, 4))
        for r in range(4):
            for c in range(4):
                patch = image[:, 2 * r : 2 * r + 6, 2 * c : 2 * c + 6].reshape(-1)
                response[:, r, c] = filters @ (whitening.T @ (contrast(patch) - center))
        active = np.maximum(response - 0.5, 0)
        rows.append(
            [active[k, r : r + 2, c : c + 2].mean() for k in range(5) for r in (0, 2) for c in (0, 2)]
        )
    expected = np.array(rows)
    expected = (expected - expected.mean(0)) / expected.std(0)  # of the images that it learned from
    assert np.allclose(encoder(images).numpy(), expected, atol=1e-3)


def test_whitening_leaves_no_correlation():
    x = torch.randn(4000, 6, generator=torch.Generator().manual_seed(0)) @ torch.randn(6, 6) * 3
    x = x - x.mean(0)
    w = floors._zca(x)
    assert torch.allclose(w, w.T, atol=1e-5)
    left, right = np.linalg.eigh(np.cov(x.numpy().T, bias=True))
    expected = right @ np.diag((left + 0.1) ** -0.5) @ right.T
    assert np.allclose(w.numpy(), expected, atol=1e-3)


def test_kmeans_finds_directions_whatever_the_lengths():
    directions = torch.eye(8)[:4]
    g = torch.Generator().manual_seed(0)
    x = directions.repeat(50, 1) * (0.5 + 3 * torch.rand(200, 1, generator=g))
    x = x + 0.02 * torch.randn(200, 8, generator=g)
    for seed in range(20):  # from some starts two centers share a direction, as with any k-means
        found = floors._spherical_kmeans(x, 4, torch.Generator().manual_seed(seed))
        assert torch.allclose(found.norm(dim=1), torch.ones(4))
        if (found @ directions.T).max(0).values.min() > 0.999:
            return
    pytest.fail("no start finds the four directions")


def test_patches_tell_textures_apart_wherever_they_begin():
    train, labels = gratings(300, seed=0)
    test, truth = gratings(200, seed=1)
    encoder = Patches(train.split(64), seed=0, filters=20)
    votes = knn_scores(encoder(train), labels, encoder(test), 2, 5)
    assert float((votes.argmax(1) == truth).double().mean()) > 0.98


def test_the_seed_decides():
    images = noise(60, 16)
    first, again, other = (Patches([images], seed, filters=8)(images) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    # Batches make no difference, and images after the first 4,000 neither.
    in_parts = Patches(images.split(7), 0, filters=8)(images)
    assert torch.allclose(in_parts, first, atol=1e-4)


@pytest.mark.parametrize("size", [8, 31, 32, 65, 224])
def test_any_size(size: int):
    """Up to 32 pixels as they are, larger ones averaged down to 32, like raw pixels."""
    images = noise(20, size)
    encoder = Patches([images], 0, filters=6)
    features = encoder(images)
    assert features.shape == (20, encoder.feature_dim) == (20, 24)
    assert features.isfinite().all()
    if size > 32:
        assert torch.equal(features, encoder(F.adaptive_avg_pool2d(images, 32)))


def test_few_images_and_flat_ones():
    encoder = Patches([torch.zeros(2, 3, 8, 8)], 0)
    assert encoder.feature_dim == 4 * max(1, 2 * 4 // 10)
    assert encoder(noise(3, 8)).isfinite().all()
