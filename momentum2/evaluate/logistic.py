"""L2-regularised logistic regression on features that are already there: a linear probe in seconds."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.evaluate.results import top1_top5
from momentum2.evaluate.subsets import stratified

#: The strengths that are tried, strongest first; the loss is mean cross-entropy + strength/2 · |W|².
STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
HELD_OUT = 0.1  # share of the training images on which the strength is chosen


class Standardise:
    """Features minus their mean, over their standard deviation, both those of the training features."""

    def __init__(self, features: Tensor) -> None:
        std, self.mean = torch.std_mean(features, dim=0, correction=0)
        self.std = torch.where(std > 1e-6 * self.mean.abs(), std, 1.0)  # a constant feature stays out of it

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std


def fit_logistic(x: Tensor, y: Tensor, classes: int, strength: float, start: Tensor | None = None) -> Tensor:
    """The minimum of mean cross-entropy + strength/2 · |W|², as (d + 1, classes): W, then the bias, which is free.

    Args:
        x: (n, d) features.
        y: (n,) int64.
        start: Where to begin (default: zero); the minimum is one and the same.
    """
    weights = torch.zeros(x.shape[1] + 1, classes, device=x.device) if start is None else start.clone()
    weights.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights], max_iter=300, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(x, weights), y) + strength / 2 * weights[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def logits(x: Tensor, weights: Tensor) -> Tensor:
    """(n, classes) of features (n, d) and weights as `fit_logistic` gives them."""
    return x @ weights[:-1] + weights[-1]


def probe(x: Tensor, y: Tensor, test: Tensor, classes: int, seed: int) -> tuple[Tensor, float]:
    """Class scores (m, classes) of the test features, and the strength that was used.

    The strength is the one that does best on a held-out tenth of the training features; the test features have no
    part in that. With it, all training features are fitted again.
    """
    held_out = torch.zeros(len(y), dtype=torch.bool)
    held_out[torch.from_numpy(stratified(y.cpu().numpy(), HELD_OUT, seed))] = True
    held_out = held_out.to(y.device)
    scale = Standardise(x[~held_out])
    fitted, best, strength = None, -np.inf, STRENGTHS[0]
    for tried in STRENGTHS:  # from strong to weak, each from the minimum of the one before
        fitted = fit_logistic(scale(x[~held_out]), y[~held_out], classes, tried, fitted)
        accuracy, _ = top1_top5(logits(scale(x[held_out]), fitted), y[held_out])
        if accuracy > best:
            best, strength = accuracy, tried
    scale = Standardise(x)
    return logits(scale(test), fit_logistic(scale(x), y, classes, strength)), strength
