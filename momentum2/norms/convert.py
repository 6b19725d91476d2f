"""Turn every batch norm of a network into another kind."""

import warnings
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2.config import Compat, NormName
from momentum2.errors import UserError
from momentum2.norms.local import LocalBatchNorm
from momentum2.norms.momentum import MomentumBatchNorm
from momentum2.norms.synced import SyncedBatchNorm

OldName = Literal["batch", "split"]

_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KNOWN = (*_TORCH, nn.SyncBatchNorm, LocalBatchNorm, SyncedBatchNorm, MomentumBatchNorm)


def convert_norms(
    module: nn.Module, kind: NormName | OldName, devices: int = 1, compat: Compat = "paper"
) -> int:
    """Make every batch norm inside `module` one of `kind`, in place; returns their number.

    Parameters stay the very same objects (an optimizer that holds them keeps working); statistics, device,
    dtype and training flag are kept. Statistics that a norm has gathered become the history of a Momentum BN;
    a fresh norm (`num_batches_tracked` 0) has no history before its first commit. "local" with one device
    keeps torch's own classes where they are.

    Args:
        module: Any network; it must contain the norms, not be one itself.
        kind: "local" (each device's own samples), "synced" (those of all processes) or "momentum".
        devices: The devices whose samples come in one batch, for "local" and "momentum".
        compat: Arithmetic of "momentum".
    """
    if kind in ("batch", "split"):
        warnings.warn(f'Norm "{kind}" is now called "local".', FutureWarning, stacklevel=2)
        devices = devices if kind == "split" else 1
        kind = "local"
    if isinstance(module, _BatchNorm):
        raise UserError(
            "A batch norm cannot replace itself. Put it into a module such as nn.Sequential first."
        )
    modules = list(module.modules())
    # All are made before the first is put in place: an error leaves the network as it was.
    new = {old: _converted(old, kind, devices, compat) for old in modules if isinstance(old, _BatchNorm)}
    if not new:
        raise UserError(f"{type(module).__name__} has no batch norm to convert.")
    for parent in modules:
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm):
                parent._modules[name] = new[child]
    return len(new)


def _converted(old: _BatchNorm, kind: NormName | OldName, devices: int, compat: Compat) -> _BatchNorm:
    if type(old) not in _KNOWN:
        raise UserError(f"{type(old).__name__} does more than batch norm, so it cannot be converted.")
    if old.running_mean is None:
        raise UserError("A batch norm with track_running_stats=False has no statistics to convert.")
    if kind == "local" and devices == 1 and type(old) in _TORCH:
        return old
    # Only Momentum BN has no rule for the running statistics of its own; leaving it, torch's default applies.
    rate = 0.1 if isinstance(old, MomentumBatchNorm) else old.momentum
    norm: _BatchNorm
    if kind == "local":
        norm = LocalBatchNorm(old.num_features, old.eps, rate, old.affine, devices)
    elif kind == "synced":
        norm = SyncedBatchNorm(old.num_features, old.eps, rate, old.affine)
    elif kind == "momentum":
        norm = MomentumBatchNorm(old.num_features, old.eps, old.affine, devices, compat)
    else:
        raise UserError(f"There is no norm called {kind!r}. Choose local, synced or momentum.")
    norm.to(old.running_mean.device, old.running_mean.dtype)
    norm.weight, norm.bias = old.weight, old.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(norm, name, getattr(old, name))
    if isinstance(norm, MomentumBatchNorm):
        norm.set_histories(norm.running_mean[None], norm.running_var[None])
    return norm.train(old.training)
