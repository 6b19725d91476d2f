"""L2-regularised logistic regression on features that are already there: a linear probe in seconds."""

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.evaluate.accuracy import top1_top5
from momentum2.evaluate.subsets import stratified

#: The strengths that are tried, strongest first; the loss is mean cross-entropy + strength/2 · |W|².
STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
HELD_OUT = 0.2  # share of the training images on which the strength is chosen


class Standardize:
    """Features minus their mean, over their standard deviation, both those of the training features."""

    def __init__(self, features: Tensor) -> None:
        std, self.mean = torch.std_mean(features, dim=0, correction=0)
        self.std = torch.where(std > 1e-6 * self.mean.abs(), std, 1.0)  # a constant feature stays out of it

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean).div_(self.std)


def fit_logistic(x: Tensor, y: Tensor, classes: int, strength: float, start: Tensor | None = None) -> Tensor:
    """The minimum of mean cross-entropy + strength/2 · |W|², as (classes, d + 1): W, then the bias.

    Args:
        x: (n, d) features.
        y: (n,) int64.
        start: Where to begin (default: zero); the minimum is one and the same.
    """
    weights = torch.zeros(classes, x.shape[1] + 1, device=x.device) if start is None else start.clone()
    weights.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=200, tolerance_grad=1e-5, tolerance_change=1e-8, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(x, weights), y) + strength / 2 * weights[:, :-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def logits(x: Tensor, weights: Tensor) -> Tensor:
    """(n, classes) of features (n, d) and weights as `fit_logistic` gives them."""
    # Contiguous, (classes, d): only then does the backward read x along its rows, many times faster on a CPU.
    return F.linear(x, weights[:, :-1].contiguous(), weights[:, -1])


def choose_strength(x: Tensor, y: Tensor, classes: int, seed: int) -> float:
    """The strength that does best on a held-out fifth of these training features; the stronger of equals."""
    held_out = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    held_out[torch.from_numpy(stratified(y.cpu().numpy(), HELD_OUT, seed)).to(y.device)] = True
    inside, outside = x[~held_out], x[held_out]
    scale = Standardize(inside)
    inside, outside = scale(inside), scale(outside)
    weights, accuracies = None, [0.0]
    for strength in STRENGTHS:  # from strong to weak, each from the minimum of the one before
        weights = fit_logistic(inside, y[~held_out], classes, strength, weights)
        accuracies.append(top1_top5(logits(outside, weights), y[held_out])[0])
        if max(accuracies[-2:]) < max(accuracies):  # twice worse: weaker ones only take longer
            break
    return STRENGTHS[max(0, accuracies.index(max(accuracies)) - 1)]


def probe(x: Tensor, y: Tensor, test: Tensor, classes: int, seed: int) -> Tensor:
    """Class scores (m, classes) of test features (m, d), which have no part in choosing the strength."""
    x, y = x.to(test.device), y.to(test.device)
    strength = choose_strength(x, y, classes, seed)
    scale = Standardize(x)
    return logits(scale(test), fit_logistic(scale(x), y, classes, strength))
