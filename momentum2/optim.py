"""The optimizers, with the parameter groups of the recipes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from momentum2.config import OptimConfig
from momentum2.muon import Muon


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    lr: float,
    constant_lr: tuple[str, ...] = (),
) -> Optimizer:
    """The optimizer of `config` for those parameters that are trained.

    Args:
        named_parameters: Of the whole method.
        config: `exclude_bias_and_norm` takes biases and norm parameters (one-dimensional tensors) out of
            weight decay and of LARS adaptation.
        lr: Peak learning rate, which parameters whose names start with one of `constant_lr` always have.
        constant_lr: Prefixes of names.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            excluded = config.exclude_bias_and_norm and parameter.ndim == 1
            groups.setdefault((excluded, name.startswith(constant_lr)), []).append(parameter)
    options = [
        {
            "params": parameters,
            "lr": lr,
            "weight_decay": 0.0 if excluded else config.weight_decay,
            "adapt": not excluded,
            "constant": constant,
        }
        for (excluded, constant), parameters in groups.items()
    ]
    if config.name == "lars":
        return LARS(options, lr, config.sgd_momentum, config.weight_decay, config.lars_eta)
    if config.name == "muon":
        return Muon(options, lr, config.sgd_momentum, config.weight_decay, config.nesterov)
    # Not `fused`: it walks raw memory, and is silently wrong where a gradient or buffer has another layout.
    return SGD(
        options,
        lr=lr,
        momentum=config.sgd_momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        foreach=True,
    )


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give every group the learning rate `lr`, except those that keep theirs."""
    for group in optimizer.param_groups:
        if not group["constant"]:
            group["lr"] = lr


class LARS(Optimizer):
    """SGD whose step is scaled, tensor by tensor, to the norm of the weights.

    Algorithm 1 of You, Gitman and Ginsburg (2017), for weights w with gradient g:

        trust = η‖w‖ / (‖g‖ + decay·‖w‖)      1 if either norm is 0, and in groups with `adapt` false
        v ← sgd_momentum·v + lr·trust·(g + decay·w)
        w ← w − v
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        sgd_momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 1e-3,
    ) -> None:
        defaults = {
            "lr": lr,
            "sgd_momentum": sgd_momentum,
            "weight_decay": weight_decay,
            "eta": eta,
            "adapt": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step; `closure` is not supported."""
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients: list[Tensor] = [p.grad for p in weights]
            decay = group["weight_decay"]
            updates = torch._foreach_add(gradients, weights, alpha=decay)
            if group["adapt"]:
                w, g = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, gradients))
                trust = (group["eta"] * w / (g + decay * w)).masked_fill_((w == 0) | (g == 0), 1.0)
                torch._foreach_mul_(updates, list(trust.unbind()))
            buffers = [self._buffer(p) for p in weights]
            torch._foreach_mul_(buffers, group["sgd_momentum"])
            torch._foreach_add_(buffers, updates, alpha=group["lr"])
            torch._foreach_sub_(weights, buffers)

    def _buffer(self, weight: Tensor) -> Tensor:
        # The name that torch's SGD gives it too.
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        return state["momentum_buffer"]  # type: ignore[no-any-return]
