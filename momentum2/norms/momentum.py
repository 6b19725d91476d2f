"""Momentum BN: normalize by the batch's statistics blended with a frozen history."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from momentum2.config import Compat
from momentum2.errors import UserError
from momentum2.norms._functional import batch_norm
from momentum2.norms.base import PlainBatchNorm

#: An alpha of a norm's own choice after the first commit, of which the second one has this share. Less is dangerous: a
#: history that lags costs far more than one that is noisy.
START = 0.5
#: The smallest such alpha, and the least weight of a commit in what it is chosen from: both look back over 200 commits.
SLOWEST = 0.005
#: The longest step of such an alpha, as a share of the correlation: norms downstream see it and answer.
FASTEST = 0.05
#: Innovations beyond so many standard deviations count as this many: one bad channel must not decide.
FAR = 6.0

Alpha = float | Literal["auto"]
_AUTO_STATE = ("alpha", "correlation", "last_mean", "last_var")


class MomentumBatchNorm(PlainBatchNorm):
    """Batch norm whose statistics are a moving average, for the teacher of a student–teacher pair.

    In training mode a device's samples are normalized by `alpha · batch + (1 − alpha) · history` for mean and
    (biased) variance. The history is frozen: a forward only adds the batch's statistics to what is pending, and
    `commit()`, once per optimizer step, averages all that is pending (any number of views and micro-batches)
    and moves the history by the same rule. alpha = 1 is training-mode batch norm, alpha = 0 evaluation mode.
    Before the first commit there is no history: a forward normalizes as with alpha = 1, and the first commit
    takes the statistics as they are. In evaluation mode it is plain batch norm with the history and records
    nothing.

    The state dict has the keys of plain batch norm: the first device's history is `running_mean` and
    `running_var`, and `num_batches_tracked` counts commits, 0 if there is no history. Loading a state dict
    gives its history to every device; `histories` and `set_histories` access each of them.

    With `alpha = "auto"` every device of every norm chooses its own alpha, by `_choose_alpha`. What it has learned is
    not in the state dict either; `auto_state` and `set_auto_state` access it.

    Args:
        num_features: c of an input (n, c, ...) of 2 to 5 dimensions.
        eps: Added to the variance.
        affine: Learn a weight and a bias per channel.
        devices: k, the devices whose samples come in one batch: each n/k consecutive samples have their
            own statistics and history.
        compat: "official" multiplies the variance by (n/(n−1))², as the authors' released code does.
    """

    _alpha: Tensor
    _more_mean: Tensor
    _more_var: Tensor
    _pending_mean: Tensor
    _pending_var: Tensor
    _pending_count: Tensor
    _one: Tensor
    _correlation: Tensor
    _last_mean: Tensor
    _last_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        devices: int = 1,
        compat: Compat = "paper",
    ) -> None:
        super().__init__(num_features, eps, momentum=None, affine=affine)
        self.devices = devices
        self.compat = compat
        self.auto = False
        # Not in the state dict: its keys are plain batch norm's. Not views of one (k, c) buffer either:
        # `.to()` would part them. Between two optimizer steps nothing is pending, and alpha is handed in.
        self.register_buffer("_more_mean", torch.zeros(devices - 1, num_features), persistent=False)
        self.register_buffer("_more_var", torch.ones(devices - 1, num_features), persistent=False)
        self.register_buffer("_alpha", torch.ones(()), persistent=False)
        self.register_buffer("_pending_mean", torch.zeros(devices, num_features), persistent=False)
        self.register_buffer("_pending_var", torch.zeros(devices, num_features), persistent=False)
        self.register_buffer("_pending_count", torch.zeros(()), persistent=False)
        self.register_buffer("_one", torch.ones(()), persistent=False)

    @property
    def alpha(self) -> float:
        """Weight of the current batch, in [0, 1]; the rest is the weight of the history.

        Set it to "auto" and the norm chooses it from commit to commit; reading it gives the mean over its devices.
        """
        return self.alphas().mean().item()

    @alpha.setter
    def alpha(self, value: float | str) -> None:
        if value == "auto":
            if not self.auto:
                self._start_auto()
            return
        if isinstance(value, str) or not 0 <= value <= 1:
            raise UserError(
                f"alpha, the weight of the current batch, must be between 0 and 1, or auto, not {value}."
            )
        if self.auto:
            self.auto, self._alpha = False, self._one.clone()
        self._alpha.fill_(value)

    def alphas(self) -> Tensor:
        """Alpha of the next forward and commit: one number, or (k, 1) where each device chooses its own."""
        return self._alpha_or_one() if self.auto else self._alpha

    def _start_auto(self) -> None:
        """Know nothing yet."""
        self.auto = True
        self._alpha = self._one.new_full((self.devices, 1), START)
        self.register_buffer("_correlation", torch.zeros_like(self._alpha), persistent=False)
        self.register_buffer("_last_mean", torch.zeros_like(self._pending_mean), persistent=False)
        self.register_buffer("_last_var", torch.zeros_like(self._pending_var), persistent=False)

    def auto_state(self) -> dict[str, Tensor]:
        """What alpha is chosen from, a row for each device; empty unless alpha is "auto"."""
        return {name: getattr(self, f"_{name}") for name in _AUTO_STATE} if self.auto else {}

    @torch.no_grad()
    def set_auto_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from an `auto_state`; alpha becomes "auto"."""
        self.alpha = "auto"
        for name, mine in self.auto_state().items():
            mine.copy_(state[name])

    def histories(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of every device's history, (k, c) each; views of the state if k is 1."""
        if self.devices == 1:
            return self.running_mean[None], self.running_var[None]
        mean = torch.cat([self.running_mean[None], self._more_mean])
        return mean, torch.cat([self.running_var[None], self._more_var])

    @torch.no_grad()
    def set_histories(self, mean: Tensor, var: Tensor) -> None:
        """Give every device its history: (k, c) each, or (1, c) for all the same."""
        mean, var = (t.expand(self.devices, -1) for t in (mean, var))
        self.running_mean.copy_(mean[0])
        self.running_var.copy_(var[0])
        self._more_mean.copy_(mean[1:])
        self._more_var.copy_(var[1:])

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            y = F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        elif self._is_short(input):
            mean, var = self._short_statistics(input)
            y = F.batch_norm(input, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        else:
            y = batch_norm(input, self.weight, self.bias, self.eps, self._statistics, self.devices)
        return self.after(y)

    def _statistics(self, mean: Tensor, var: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """alpha · batch + (1 − alpha) · history, (k, c) each; and the batch becomes pending."""
        if self.compat == "official":
            var = var * (n / max(n - 1, 1)) ** 2
        # An overflown variance would blend to NaN (inf − inf) where plain batch norm stays finite.
        var = var.clamp(max=torch.finfo(var.dtype).max)
        pending = [self._pending_mean, self._pending_var, self._pending_count]
        torch._foreach_add_(pending, [mean.detach(), var.detach(), self._one])
        alpha, (old_mean, old_var) = self._alpha_or_one(), self.histories()
        if (
            not alpha.dtype == old_mean.dtype == old_var.dtype == mean.dtype
        ):  # asking for a dtype that is there takes a call, too
            alpha, old_mean, old_var = (t.to(mean.dtype) for t in (alpha, old_mean, old_var))
        return old_mean.lerp(mean, alpha), old_var.lerp(var, alpha)

    def _is_short(self, x: Tensor) -> bool:
        """Whether `_short_statistics` will do."""
        return (
            self.devices == 1
            and self.compat == "paper"
            and x.device.type == "cpu"
            and x.dtype == self.running_mean.dtype == torch.float32
            and (self.weight is None or self.weight.dtype == torch.float32)
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def _short_statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`_statistics` of x on one device, (c,) each, with the same bits in fewer calls.

        Each call releases Python's lock; while another thread works on another view, getting the lock back takes longer
        than the call itself.
        """
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
        var.clamp_(max=torch.finfo(var.dtype).max)
        pending = [self._pending_mean, self._pending_var, self._pending_count]
        torch._foreach_add_(pending, [mean, var, self._one])
        alpha = self._alpha_or_one()
        if self.auto:  # (1, 1), a row for the one device
            alpha = alpha.view(())
        mean, var = torch._foreach_lerp([self.running_mean, self.running_var], [mean, var], [alpha, alpha])
        return mean, var

    def _alpha_or_one(self) -> Tensor:
        """alpha, or 1 before the first commit. Not `where`, which copies a number to the device and waits."""
        return self._alpha.masked_fill(self.num_batches_tracked == 0, 1.0)

    def pending(self) -> tuple[Tensor, Tensor]:
        """Each device's mean of the statistics seen since the last commit, (k, c) each; zeros if there were none."""
        mean, var = _pending([self])[0].view(2, self.devices, -1)
        return mean, var

    @torch.no_grad()
    def commit(self) -> None:
        """Move the histories to `alpha · pending + (1 − alpha) · history`, and start collecting again.

        Changes nothing when nothing is pending. Never waits for the device.
        """
        commit_all([self])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.set_histories(self.running_mean[None], self.running_var[None])

    def extra_repr(self) -> str:
        return (
            f"{self.num_features}, eps={self.eps}, affine={self.affine}, devices={self.devices}, "
            f"compat={self.compat}"
        )


def momentum_norms(module: nn.Module) -> Iterator[MomentumBatchNorm]:
    """Every Momentum BN in `module`, for setting alpha and committing where there is no MomentumTeacher."""
    return (m for m in module.modules() if isinstance(m, MomentumBatchNorm))


def alphas_of(norms: Sequence[MomentumBatchNorm]) -> Tensor:
    """The alpha of each; of several devices, their mean."""
    return torch.stack([norm.alphas().mean() for norm in norms]) if norms else torch.zeros(0)


def set_alpha(norms: Sequence[MomentumBatchNorm], value: Alpha) -> None:
    """Give all of them an alpha, or have each choose its own."""
    if value == "auto" or any(norm.auto for norm in norms):
        for norm in norms:
            norm.alpha = value
    elif norms:
        norms[0].alpha = value  # which looks at it
        alphas = [norm._alpha for norm in norms]
        torch._foreach_zero_(alphas)
        torch._foreach_add_(alphas, value)


@torch.no_grad()
def commit_all(norms: Sequence[MomentumBatchNorm]) -> None:
    """`commit()` of each, in a few operations for all: a GPU takes longer to be asked for them than to do them."""
    for group in _alike(norms):
        histories = _histories(group)
        new, some = _pending(group)
        tracked = [norm.num_batches_tracked for norm in group]
        fresh = torch.stack(tracked) == 0
        moved = torch.cat(histories).view(2, -1)
        if group[0].auto:
            weights = _choose_alpha(group, moved, new, fresh, some)
        else:
            alpha = (
                torch.stack([norm._alpha for norm in group]).masked_fill_(fresh, 1.0).masked_fill_(~some, 0.0)
            )
            weights = _each_channel(group, alpha)
        moved.lerp_(new, weights)
        torch._foreach_copy_(histories, moved.view(-1).split([part.numel() for part in histories]))
        torch._foreach_add_(tracked, list(some.to(tracked[0].dtype).unbind()))
        torch._foreach_zero_(
            [t for norm in group for t in (norm._pending_mean, norm._pending_var, norm._pending_count)]
        )


def _choose_alpha(
    norms: list[MomentumBatchNorm], old: Tensor, new: Tensor, fresh: Tensor, some: Tensor
) -> Tensor:
    """The weights of a commit, one for each device and channel of all; and the alpha of the next one.

    If the statistics of all data are a random walk, of which a step sees a noisy sample, then the history estimates
    them best with the alpha at which successive innovations (new − old) are uncorrelated: if alpha is too small, the
    history lags and they repeat; if it is too large, it follows the noise and they alternate. So alpha moves by their
    correlation, at a rate that falls with it: the smaller alpha, the longer it takes to see.

    Whatever is not finite in `new` is replaced by the history's.
    """
    devices, sizes = [norm.devices for norm in norms], [norm._pending_mean.numel() for norm in norms]
    fresh, some = (_repeated(flags, devices) for flags in (fresh, some))
    own = torch.cat([norm._alpha for norm in norms]).view(-1)
    alpha = own.masked_fill(fresh, 1.0).mul_(some)

    torch.where(new.isfinite(), new, old, out=new)
    var = old[1] + norms[0].eps
    # In units of the history's standard deviation, and of what a Gaussian's variance differs by beside its mean.
    e = ((new - old) / torch.stack((var.sqrt(), var * 2**0.5))).nan_to_num_().clamp_(-FAR, FAR)
    lasts = [norm._last_mean for norm in norms] + [norm._last_var for norm in norms]
    last = torch.cat([part.view(-1) for part in lasts]).view(2, -1)
    known = (some & ~fresh).to(own.dtype)  # without a history there is no innovation
    rate = (own / 10).clamp_(min=SLOWEST).mul_(known)

    # With Σ over channels, 2 Σ e·e' / (Σ e² + Σ e'²) of successive e and e'. An average of ratios, not a ratio of
    # averages: however large the innovations of a step are, it counts as one.
    powers = torch.stack((e + last, e - last)).square_().sum(1)
    rows = zip(powers.split(sizes, 1), devices, strict=True)
    together, apart = torch.cat([part.view(2, k, -1).sum(2) for part, k in rows], 1)
    ratio = (together - apart) / (together + apart).clamp_(min=torch.finfo(e.dtype).tiny)
    correlation = torch.cat([norm._correlation for norm in norms]).view(-1).lerp_(ratio, rate)
    own.addcmul_(rate.clamp(max=FASTEST), correlation).clamp_(SLOWEST, 1)

    last.lerp_(e, _each_row(norms, known))
    torch._foreach_copy_([norm._alpha for norm in norms], own[:, None].split(devices))
    torch._foreach_copy_([norm._correlation for norm in norms], correlation[:, None].split(devices))
    torch._foreach_copy_([part.view(-1) for part in lasts], last.view(-1).split(2 * sizes))
    return _each_row(norms, alpha)


@torch.no_grad()
def drift_of(norms: Sequence[MomentumBatchNorm]) -> Tensor:
    """How far the pending statistics are from the histories; 0 where nothing is pending.

    The mean over norms, devices and channels of |mean − history's mean| + |std − history's std|, in units of the
    history's std.
    """
    drifts = []
    for group in _alike(norms):
        (mean, var), some = _pending(group)
        old_mean, old_var = torch.cat(_histories(group)).view(2, -1)
        eps = group[0].eps
        std = (old_var + eps).sqrt()
        moved = ((mean - old_mean).abs() + ((var + eps).sqrt() - std).abs()) / std
        sizes = [float(norm._pending_mean.numel()) for norm in group]
        weights = torch.stack(torch._foreach_div(list(some.to(mean.dtype).unbind()), sizes))
        drifts.append((moved * _each_channel(group, weights)).sum())
    return torch.stack(drifts).sum() / len(norms) if drifts else torch.zeros(())


def _alike(norms: Sequence[MomentumBatchNorm]) -> Iterator[list[MomentumBatchNorm]]:
    """The norms in groups whose statistics fit into one tensor."""
    groups: dict[tuple[torch.device, torch.dtype, float, bool], list[MomentumBatchNorm]] = {}
    for norm in norms:
        mean = norm.running_mean
        groups.setdefault((mean.device, mean.dtype, norm.eps, norm.auto), []).append(norm)
    return iter(groups.values())


def _histories(norms: list[MomentumBatchNorm]) -> list[Tensor]:
    """The parts of all means, then of all variances; together in the order of `_pending`."""
    means = [part for norm in norms for part in (norm.running_mean, norm._more_mean.view(-1))]
    return means + [part for norm in norms for part in (norm.running_var, norm._more_var.view(-1))]


def _each_channel(norms: list[MomentumBatchNorm], values: Tensor) -> Tensor:
    """A value of each norm, repeated for its devices and channels."""
    return _repeated(values, [norm._pending_mean.numel() for norm in norms])


def _each_row(norms: list[MomentumBatchNorm], values: Tensor) -> Tensor:
    """A value of each device of each norm, repeated for its channels."""
    rows = values[:, None].split([norm.devices for norm in norms])
    return torch.cat([row.expand(-1, n.num_features).reshape(-1) for row, n in zip(rows, norms, strict=True)])


def _repeated(values: Tensor, times: list[int]) -> Tensor:
    """Each value so many times. Not `repeat_interleave`, which would have the numbers on the device."""
    return torch.cat([value.expand(count) for value, count in zip(values.unbind(), times, strict=True)])


def _pending(norms: list[MomentumBatchNorm]) -> tuple[Tensor, Tensor]:
    """Means and variances seen since the last commit, (2, devices and channels of all); and which norms have any."""
    counts = torch.stack([norm._pending_count for norm in norms])
    sums = [norm._pending_mean.view(-1) for norm in norms] + [norm._pending_var.view(-1) for norm in norms]
    new = torch.cat(sums).view(2, -1).div_(_each_channel(norms, counts.clamp(min=1)))
    new[1].clamp_(max=torch.finfo(new.dtype).max)
    return new, counts > 0
