import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from momentum2.errors import UserError
from momentum2.evaluate.knn import knn_scores


def clusters(n: int, classes: int, dim: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping classes around directions, so that neighbors disagree."""
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (n,), generator=g)
    return centers[labels] + 1.5 * torch.randn(n, dim, generator=g), labels


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (200, 0.5)])
def test_predictions_equal_those_of_scikit_learn(k: int, temperature: float):
    train, labels = clusters(1500, 12, 24, seed=0)
    test, _ = clusters(400, 12, 24, seed=1)
    scores = knn_scores(train, labels, test, 12, k, temperature)
    reference = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(train.double().numpy(), labels.numpy())
    assert np.array_equal(scores.argmax(1).numpy(), reference.predict(test.double().numpy()))
    shares = scores / scores.sum(1, keepdim=True)
    assert np.allclose(shares.numpy(), reference.predict_proba(test.double().numpy()), atol=1e-4)


def test_the_first_of_equally_near_neighbors_is_taken():
    bank = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [-1.0, 0.0]])
    labels = torch.tensor([0, 1, 2, 3, 4])
    # Of the three equal ones at the edge of k = 2 (after a nearer one, and as the nearest), the first count.
    nearer = knn_scores(bank, labels, torch.tensor([[2.0, 1.0]]), 5, k=2)
    assert nearer.nonzero()[:, 1].tolist() == [0, 1]
    equal = knn_scores(bank, labels, torch.tensor([[0.0, 1.0]]), 5, k=2)
    assert equal.nonzero()[:, 1].tolist() == [1, 2]


def quarters(n: int, seed: int) -> torch.Tensor:
    """Vectors with four entries of ±1: their similarities are quarters without rounding, and many are equal."""
    g = torch.Generator().manual_seed(seed)
    places = torch.rand(n, 16, generator=g).argsort(1)[:, :4]
    return torch.zeros(n, 16).scatter_(1, places, torch.randint(2, (n, 4), generator=g) * 2.0 - 1)


@pytest.mark.parametrize("bank", [300, 64, 7])
@pytest.mark.parametrize("k", [1, 20, 299])
def test_blocks_of_queries_and_of_the_bank_give_the_same_votes(
    bank: int, k: int, monkeypatch: pytest.MonkeyPatch
):
    train, labels, test = quarters(300, 0), torch.arange(300), quarters(130, 1)
    nearest = (train @ test.T).T.sort(dim=1, descending=True, stable=True).indices[:, :k]
    monkeypatch.setattr("momentum2.evaluate.knn._BLOCK", bank * 7)
    monkeypatch.setattr("momentum2.evaluate.knn._BANK", bank)
    votes = knn_scores(train, labels, test, 300, k, temperature=1)
    assert torch.equal(votes > 0, torch.zeros(130, 300, dtype=torch.bool).scatter_(1, nearest, True))


def test_a_tiny_temperature_does_not_overflow():
    train, labels = clusters(100, 3, 8, seed=0)
    assert torch.isfinite(knn_scores(train, labels, train, 3, temperature=1e-3)).all()


@pytest.mark.parametrize("k", [0, 11])
def test_k_is_checked(k: int):
    with pytest.raises(UserError, match=r"^k must be from 1 to 10"):
        knn_scores(torch.ones(10, 2), torch.zeros(10, dtype=torch.long), torch.ones(1, 2), 2, k)


def test_temperature_is_checked():
    with pytest.raises(UserError, match="above 0"):
        knn_scores(torch.ones(10, 2), torch.zeros(10, dtype=torch.long), torch.ones(1, 2), 2, 3, 0.0)
