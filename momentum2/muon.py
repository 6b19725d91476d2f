"""Muon: momentum whose step has singular values near 1 for every matrix."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: a, b, c of each step of the quintic iteration, as J. You chose them for five steps.
_QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
#: Share of the learning rate that AdamW has, and its two memories.
_ADAMW_RATE, _BETAS = 0.15, (0.9, 0.99)


def orthogonalized(matrix: Tensor) -> Tensor:
    """`matrix` (m×n) with its singular vectors, and singular values near 1.

    They are between 0.85 and 1.15, except those that were less than 0.002 of the matrix's norm, which stay smaller.

    Newton–Schulz steps X ← (aI + bA + cA²)X with A = XXᵀ. They are polynomials of the first A, so they are multiplied
    in the smaller of both dimensions, and X itself only at the end: for a convolution that is less than half the work.
    """
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-12)
    gram = x @ x.mT
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    product = factor = _factor(gram, identity, *_QUINTIC[0])
    for coefficients in _QUINTIC[1:]:
        gram = factor @ gram @ factor
        factor = _factor(gram, identity, *coefficients)
        product = factor @ product
    found: Tensor = product @ x
    return found.mT if matrix.shape[0] > matrix.shape[1] else found


def _factor(gram: Tensor, identity: Tensor, a: float, b: float, c: float) -> Tensor:
    """aI + bA + cA²"""
    return torch.addmm(a * identity + b * gram, gram, gram, alpha=c)


class ByGroup(Optimizer):
    """An optimizer that steps for one group of parameters after the other, and keeps tensors like each of them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; `closure` is not supported."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                self._step(weights, [weight.grad for weight in weights], group)

    @abstractmethod
    def _step(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None: ...

    def _memories(self, name: str, weights: list[Tensor]) -> list[Tensor]:
        for weight in weights:
            if name not in self.state[weight]:
                self.state[weight][name] = torch.zeros_like(weight)
        return [self.state[weight][name] for weight in weights]


class Muon(ByGroup):
    """Muon (Jordan 2024) for weights of two and more dimensions, AdamW for the others.

    For a weight W, as a matrix of outputs × all else, with gradient G:

        V ← sgd_momentum·V + G
        W ← (1 − lr·decay)·W − lr·max(1, outputs / all else)^½ · orthogonalized(V, or with Nesterov G + sgd_momentum·V)

    Biases and the weights of norms go by AdamW at 0.15 of the learning rate, with β = (0.9, 0.99).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        sgd_momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        options = {"sgd_momentum": sgd_momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, {"lr": lr, **options})

    def _step(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        vectors = []
        for weight, gradient in zip(weights, gradients, strict=True):
            if weight.ndim > 1:
                self._muon(weight, gradient, group)
            else:
                vectors.append((weight, gradient))
        if vectors:
            self._adamw([weight for weight, _ in vectors], [gradient for _, gradient in vectors], group)

    def _muon(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        momentum, (velocity,) = group["sgd_momentum"], self._memories("momentum_buffer", [weight])
        velocity.mul_(momentum).add_(gradient)
        matrix = (gradient.add(velocity, alpha=momentum) if group["nesterov"] else velocity).flatten(1)
        step = orthogonalized(matrix).reshape(weight.shape)
        outputs, rest = matrix.shape
        weight.sub_(step, alpha=group["lr"] * max(1, outputs / rest) ** 0.5)

    def _adamw(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        means, squares = self._memories("exp_avg", weights), self._memories("exp_avg_sq", weights)
        counts = [self.state[w].setdefault("step", torch.zeros((), device=w.device)) for w in weights]
        torch._foreach_add_(counts, 1)
        torch._foreach_lerp_(means, gradients, 1 - _BETAS[0])
        torch._foreach_mul_(squares, _BETAS[1])
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - _BETAS[1])
        # Of the first, which all have; a tensor, so that a GPU is not waited for.
        mean_part, square_part = (1 - beta ** counts[0] for beta in _BETAS)
        sizes = torch._foreach_sqrt(squares)
        torch._foreach_div_(sizes, square_part.sqrt())
        torch._foreach_add_(sizes, 1e-8)
        steps = torch._foreach_div(means, sizes)
        torch._foreach_mul_(steps, _ADAMW_RATE * group["lr"] / mean_part)
        torch._foreach_sub_(weights, steps)
