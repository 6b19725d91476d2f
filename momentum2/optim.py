"""The optimizers, with the parameter groups of the recipes."""

from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from momentum2.backbones import timm_networks
from momentum2.config import OptimConfig, OptimName
from momentum2.errors import SettingError
from momentum2.muon import ByGroup, Muon

#: Tensors that an optimizer keeps for each parameter; muon, for nearly all of them.
STATES: dict[OptimName, int] = {"sgd": 1, "lars": 1, "muon": 1, "adamw": 2}

#: The optimizers that read a setting, of the settings that not all of them do.
READ_BY: dict[str, tuple[OptimName, ...]] = {
    "sgd_momentum": ("sgd", "lars", "muon"),
    "nesterov": ("sgd", "muon"),
    "lars_eta": ("lars",),
    "weight_decay_end": ("adamw",),
}


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    lr: float,
    constant_lr: tuple[str, ...] = (),
    encoder: tuple[str, nn.Module] | None = None,
) -> Optimizer:
    """The optimizer of `config` for those parameters that are trained.

    Args:
        named_parameters: Of the whole method.
        config: `exclude_bias_and_norm` takes biases and norm parameters (one-dimensional tensors) out of
            weight decay and of LARS adaptation; what the encoder's `no_weight_decay()` names is always out of them.
        lr: Peak learning rate, which parameters whose names start with one of `constant_lr` always have.
        constant_lr: Prefixes of names.
        encoder: The one that is trained, and where among the names it is.
    """
    scales, undecayed = ({}, set()) if encoder is None else _of_encoder(*encoder, config)
    freezes = config.freeze_encoder_epochs > 0  # what takes its first step later has a group of its own
    groups: dict[tuple[bool, bool, float, bool], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            excluded = (config.exclude_bias_and_norm and parameter.ndim <= 1) or name in undecayed
            key = excluded, name.startswith(constant_lr), scales.get(name, 1.0), freezes and name in scales
            groups.setdefault(key, []).append(parameter)
    options = [
        {
            "params": parameters,
            "lr": lr,
            "weight_decay": 0.0 if excluded else config.weight_decay,
            "adapt": not excluded,
            "constant": constant,
            "scale": scale,
        }
        for (excluded, constant, scale, _), parameters in groups.items()
    ]
    if config.name == "adamw":
        return AdamW(options, lr=lr, betas=(0.9, 0.999), weight_decay=config.weight_decay, foreach=True)
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


def _of_encoder(place: str, encoder: nn.Module, config: OptimConfig) -> tuple[dict[str, float], set[str]]:
    """Factors of the learning rate, and names without decay, of the parameters of the encoder at `place`.

    Both are what a network of timm says about itself (`group_matcher`, `no_weight_decay`); any module may.
    """
    full = {id(p): f"{place}.{name}" if place else name for name, p in encoder.named_parameters()}
    patterns = cast(Any, encoder).no_weight_decay() if hasattr(encoder, "no_weight_decay") else ()
    undecayed = {
        full[id(p)] for n, p in encoder.named_parameters() if any(fnmatch(n, pattern) for pattern in patterns)
    }
    scales = dict.fromkeys(full.values(), config.encoder_lr)
    if config.layer_decay is not None:
        if not hasattr(encoder, "group_matcher"):
            raise SettingError(
                "optim.layer_decay",
                "is only for timm networks, which say what their layers are. Leave it out.",
            )
        for group in timm_networks.layer_groups(encoder, config.layer_decay):
            scales |= {full[id(p)]: config.encoder_lr * group["lr_scale"] for p in group["params"]}
    return scales, undecayed


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give every group its share of the learning rate `lr`, except those that keep theirs."""
    for group in optimizer.param_groups:
        if not group["constant"]:
            group["lr"] = lr * group["scale"]


def set_weight_decay(optimizer: Optimizer, decay: float) -> None:
    """Give every group that decays the weight decay `decay`."""
    for group in optimizer.param_groups:
        if group["adapt"]:
            group["weight_decay"] = decay


class LARS(ByGroup):
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
        options = {"sgd_momentum": sgd_momentum, "weight_decay": weight_decay, "eta": eta}
        super().__init__(params, {"lr": lr, **options, "adapt": True})

    def _step(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        updates = torch._foreach_add(gradients, weights, alpha=decay)
        if group["adapt"]:
            w, g = (torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, gradients))
            trust = (group["eta"] * w / (g + decay * w)).masked_fill_((w == 0) | (g == 0), 1.0)
            torch._foreach_mul_(updates, list(trust.unbind()))
        buffers = self._memories("momentum_buffer", weights)  # the name that torch's SGD gives it too
        torch._foreach_mul_(buffers, group["sgd_momentum"])
        torch._foreach_add_(buffers, updates, alpha=group["lr"])
        torch._foreach_sub_(weights, buffers)
