"""Turn every batch norm of a network into another kind."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2.config import Compat, NormName
from momentum2.errors import UserError
from momentum2.norms.base import PlainBatchNorm
from momentum2.norms.momentum import MomentumBatchNorm
from momentum2.norms.split import SplitBatchNorm
from momentum2.norms.synced import SyncedBatchNorm

_TORCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_KNOWN = (*_TORCH, nn.SyncBatchNorm, PlainBatchNorm, SplitBatchNorm, SyncedBatchNorm, MomentumBatchNorm)


def convert_norms(module: nn.Module, kind: NormName, devices: int = 1, compat: Compat = "paper") -> int:
    """Make every batch norm inside `module` one of `kind`, in place; returns how many there are.

    Parameters stay the very same objects (an optimizer that holds them keeps working); statistics, device,
    dtype and training flag are kept. Statistics that a norm has gathered become the history of a Momentum BN;
    those of a fresh norm (`num_batches_tracked` 0) are replaced at its first commit. "batch" keeps torch's
    own classes where they are and turns the rest into `PlainBatchNorm`.

    Args:
        module: Any network; it must contain the norms, not be one itself.
        kind: "batch", "split", "synced" or "momentum".
        devices: Virtual devices of "split" and "momentum".
        compat: Arithmetic of "momentum".
    """
    if isinstance(module, _BatchNorm):
        raise UserError(
            "A batch norm cannot replace itself; put it into a module, such as nn.Sequential, first."
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


def _converted(old: _BatchNorm, kind: NormName, devices: int, compat: Compat) -> _BatchNorm:
    if type(old) not in _KNOWN:
        raise UserError(f"{type(old).__name__} does more than batch norm, so it cannot be converted.")
    if old.running_mean is None:
        raise UserError("A batch norm with track_running_stats=False has no statistics to convert.")
    if kind == "batch" and type(old) in _TORCH:
        return old
    # Only Momentum BN has no rule for the running statistics of its own; leaving it, torch's default applies.
    rate = 0.1 if isinstance(old, MomentumBatchNorm) else old.momentum
    norm: _BatchNorm
    if kind == "batch":
        norm = PlainBatchNorm(old.num_features, old.eps, rate, old.affine)
    elif kind == "split":
        norm = SplitBatchNorm(old.num_features, old.eps, rate, old.affine, devices)
    elif kind == "synced":
        norm = SyncedBatchNorm(old.num_features, old.eps, rate, old.affine)
    elif kind == "momentum":
        norm = MomentumBatchNorm(old.num_features, old.eps, old.affine, devices, compat)
    else:
        raise UserError(f"There is no norm called {kind!r}; choose batch, split, synced or momentum.")
    norm.to(old.running_mean.device, old.running_mean.dtype)
    norm.weight, norm.bias = old.weight, old.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(norm, name, getattr(old, name))
    return norm.train(old.training)
