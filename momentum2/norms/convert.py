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
_OURS = (LocalBatchNorm, SyncedBatchNorm, MomentumBatchNorm)


def convert_norms(
    module: nn.Module, kind: NormName | OldName, devices: int = 1, compat: Compat = "paper"
) -> int:
    """Convert every batch norm inside `module` to `kind`, in place; returns their number, 0 if there are none.

    Parameters stay the very same objects (an optimizer that holds them keeps working); statistics, device,
    dtype and training flag are kept. Statistics that a norm has gathered become the history of a Momentum BN;
    a fresh norm (`num_batches_tracked` 0) has no history before its first commit. "local" with one device
    keeps torch's own classes where they are. A norm with the children `drop` and `act` (timm's BatchNormAct2d)
    keeps both. Any other class with running statistics is refused by name.

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
        raise UserError("A batch norm cannot replace itself. Put it in a module such as nn.Sequential first.")
    modules = list(module.modules())
    # All are made before the first is put in place: an error leaves the network as it was.
    new = {old: _converted(old, kind, devices, compat) for old in modules if _has_statistics(old)}
    for parent in modules:
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return len(new)


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or getattr(module, "running_mean", None) is not None


def _with_activation(norm: nn.Module) -> bool:
    """Whether a norm is as timm's BatchNormAct2d: torch's, then its child `drop`, then its child `act`."""
    bases = type(norm).__bases__
    return bases == (nn.BatchNorm2d,) and [name for name, _ in norm.named_children()] == ["drop", "act"]


def _converted(old: nn.Module, kind: NormName | OldName, devices: int, compat: Compat) -> _BatchNorm:
    known = type(old) in (*_TORCH, nn.SyncBatchNorm, *_OURS) or _with_activation(old)
    if not isinstance(old, _BatchNorm) or not known:
        raise UserError(
            f"{type(old).__name__} has running statistics but is not plain batch norm, so it cannot be converted."
        )
    if old.running_mean is None:
        raise UserError("A batch norm with track_running_stats=False has no statistics to convert.")
    if kind == "local" and devices == 1 and type(old) not in (nn.SyncBatchNorm, *_OURS):
        return old
    # Only Momentum BN has no rule for the running statistics of its own; leaving it, torch's default applies.
    rate = 0.1 if isinstance(old, MomentumBatchNorm) else old.momentum
    norm: LocalBatchNorm | SyncedBatchNorm | MomentumBatchNorm
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
    norm.drop, norm.act = getattr(old, "drop", None), getattr(old, "act", None)
    if isinstance(norm, MomentumBatchNorm):
        norm.set_histories(norm.running_mean[None], norm.running_var[None])
    norm.training = old.training  # not `train`, which would reach the dropout
    return norm
