import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from momentum2.evaluate import logistic
from momentum2.evaluate.accuracy import top1_top5
from momentum2.evaluate.logistic import Standardize, choose_strength, fit_logistic, logits, probe


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,197 training and 600 test images of handwritten digits, 64 pixels each, some always 0."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = torch.from_numpy(x[order]).float(), torch.from_numpy(y[order]).long()
    return x[:-600], y[:-600], x[-600:], y[-600:]


@pytest.mark.parametrize("strength", [1e-1, 1e-3])
def test_the_minimum_is_that_of_scikit_learn(digits: tuple[torch.Tensor, ...], strength: float):
    x, y, test, test_labels = digits
    scale = Standardize(x)
    weights = fit_logistic(scale(x), y, 10, strength)
    reference = LogisticRegression(C=1 / (strength * len(x)), max_iter=5000, tol=1e-8)
    reference.fit(scale(x).double().numpy(), y.numpy())
    expected = torch.from_numpy(reference.predict_proba(scale(test).double().numpy())).float()
    found = logits(scale(test), weights).softmax(1)
    assert (found - expected).abs().max() < 0.01
    assert abs(top1_top5(found, test_labels)[0] - top1_top5(expected, test_labels)[0]) <= 0.5


def test_a_start_elsewhere_ends_at_the_same_minimum(digits: tuple[torch.Tensor, ...]):
    x, y, _, _ = digits
    x = Standardize(x)(x)
    elsewhere = torch.randn(10, 65, generator=torch.Generator().manual_seed(0))
    a, b = fit_logistic(x, y, 10, 1e-2), fit_logistic(x, y, 10, 1e-2, start=elsewhere)
    assert (logits(x, a).softmax(1) - logits(x, b).softmax(1)).abs().max() < 0.01


def test_the_strength_is_chosen_on_images_that_were_held_out(monkeypatch: pytest.MonkeyPatch):
    """Where a fifth of the labels is noise and every fit can be perfect, the weakest strength is not best."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(100, 200, generator=g), torch.randint(2, (100,), generator=g)
    y[:80] = (x[:80, 0] > 0).long()
    seen = []
    original = logistic.fit_logistic

    def watched(inside: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(len(inside))
        return original(inside, *rest)

    monkeypatch.setattr(logistic, "fit_logistic", watched)
    assert choose_strength(x, y, 2, seed=0) > 1e-6
    assert len(seen) < 7  # the sweep ends when weaker ones do worse
    assert set(seen) == {80}
    probe(x, y, x[:1], 2, seed=0)
    assert seen[-1] == 100  # the fit that is used saw them all


def test_probe_is_as_good_as_scikit_learn(digits: tuple[torch.Tensor, ...]):
    x, y, test, test_labels = digits
    scale = Standardize(x)
    found = top1_top5(probe(x, y, test, 10, seed=0), test_labels)[0]
    reference = LogisticRegression(C=1 / (choose_strength(x, y, 10, seed=0) * len(x)), max_iter=5000)
    expected = 100 * reference.fit(scale(x), y).score(scale(test), test_labels)
    assert abs(found - expected) <= 0.5
    assert found > 95


def test_probing_twice_gives_the_same_bits(digits: tuple[torch.Tensor, ...]):
    x, y, test, _ = digits
    first, second = (probe(x[:300], y[:300], test, 10, seed=1) for _ in range(2))
    assert torch.equal(first, second)


def test_a_constant_feature_does_no_harm():
    x = torch.tensor([[1.0, 7.0], [2.0, 7.0], [4.0, 7.0]])
    assert Standardize(x)(x)[:, 1].tolist() == [0, 0, 0]
    assert Standardize(x)(x)[:, 0].std(correction=0) == pytest.approx(1)
