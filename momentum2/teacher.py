"""The Momentum² teacher: a moving average of the student's weights and of its own batch statistics."""

import copy
from collections.abc import Iterable, Iterator
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2 import distributed
from momentum2.config import Compat, History, NormName
from momentum2.errors import UserError
from momentum2.norms import MomentumBatchNorm, convert_norms, momentum_norms
from momentum2.norms.convert import OldName
from momentum2.norms.momentum import Alpha, alphas_of, commit_all, drift_of, set_alpha

TeacherNorm = NormName | OldName | Literal["ema"]


class MomentumTeacher(nn.Module):
    """A frozen copy of a student that follows it slowly, with its own kind of batch norm.

    One optimizer step: any number of forwards `z = teacher(view)`, without gradient; `optimizer.step()`; then
    `teacher.update(student, weight=m, statistics=alpha)`. Between two updates the teacher does not change,
    so views and micro-batches may come in any order and number.

    It makes targets, so nothing in it is random: the network is in evaluation mode, and only its norms
    are in training mode. `eval()` is for evaluation.

    Args:
        student: Any network with batch norms (with "ema", any network at all), also wrapped in
            DistributedDataParallel or torch.compile.
        norm: The teacher's norms: "momentum" (the paper); "local" or "synced", whose running statistics come
            from the forwards, as usual; or "ema" (EMAN), which normalizes by running statistics that follow
            the student's as the weights do, whatever the batch.
        history: Each device has its own momentum statistics ("local", the paper), or their mean over all
            devices after every update ("global"), by one collective outside the forward pass.
        devices: The devices whose samples come in one batch, for "momentum" and "local".
        compat: "official" for the arithmetic of the authors' code.
    """

    def __init__(
        self,
        student: nn.Module,
        norm: TeacherNorm = "momentum",
        history: History = "local",
        devices: int = 1,
        compat: Compat = "paper",
    ) -> None:
        super().__init__()
        if history not in ("local", "global"):
            raise UserError(f"There is no history called {history!r}. Choose local or global.")
        self.network = copy.deepcopy(_unwrapped(student))
        self.norm, self.history = norm, history
        if norm == "ema":  # plain norms, which stay in evaluation mode
            convert_norms(self, "local")
        elif convert_norms(self, norm, devices, compat) == 0:
            raise UserError(
                f"{type(self.network).__name__} has no batch norm to convert. For a teacher that follows the weights "
                'alone, use norm="ema".'
            )
        self.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Self:
        super().train(False)
        for module in self.network.modules():
            if isinstance(module, _BatchNorm):
                # Not `train`, which would reach the dropout that some norms have inside.
                module.training = mode and self.norm != "ema"
        self.training = mode
        return self

    @property
    def alpha(self) -> float:
        """Weight of the current batch relative to the history, in forward passes and in the update; initially 1.

        Without Momentum BN it stays 1, which is what plain batch norm does. Set it to "auto" and each norm chooses its
        own from update to update; reading it gives the first norm's, `alphas` those of all.
        """
        return next((norm.alpha for norm in momentum_norms(self)), 1.0)

    @alpha.setter
    def alpha(self, value: Alpha) -> None:
        set_alpha(list(momentum_norms(self)), value)

    def alphas(self) -> Tensor:
        """The alpha of each Momentum BN, in the order of the network; of several devices, their mean."""
        return alphas_of(list(momentum_norms(self)))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, student: nn.Module, weight: float, statistics: Alpha | None = None) -> None:
        """Follow the student after its optimizer step, and commit the pending statistics.

        Args:
            student: The network that this teacher was made from; parameters are matched by name.
            weight: m, the share of the student in the new weights: (1 − m) · teacher + m · student.
            statistics: alpha of this commit and of the forward passes after it, or "auto"; None leaves `self.alpha`
                unchanged.
        """
        student = _unwrapped(student)
        ours, theirs = _matched(self.network.named_parameters(), student.named_parameters())
        if not 0 <= weight <= 1:
            raise UserError(f"weight, the share of the student, must be between 0 and 1, not {weight}.")
        if statistics is not None:
            self.alpha = statistics
        norms = list(momentum_norms(self))
        averaged = self.history == "global" and not any(norm.auto for norm in norms)
        if self.history == "global" and not averaged:
            _average_pending(norms)  # before the commit, so that all choose the same alpha
        commit_all(norms)
        mean = self._start_mean(norms) if averaged else None
        if self.norm == "ema":
            own, followed = _matched(_statistics(self.network), _statistics(student))
            followed = [statistic.clone() for statistic in followed]
            distributed.broadcast_(followed)  # device 0's count; the student keeps its own
            for mine, theirs_ in zip(*_matched(_counts(self.network), _counts(student)), strict=True):
                mine.copy_(theirs_)
            ours, theirs = ours + own, theirs + followed
        torch._foreach_lerp_(ours, theirs, weight)
        if mean is not None:
            mean.wait()
        if averaged:
            for norm in norms:
                norm.set_histories(norm.running_mean[None], norm.running_var[None])

    def _start_mean(self, norms: list[MomentumBatchNorm]) -> distributed.PendingMean | None:
        """Begin to average the histories: those of this process's devices at once, then over the processes."""
        for norm in norms:
            mean, var = norm.histories()
            norm.set_histories(mean.mean(0, keepdim=True), var.mean(0, keepdim=True))
        return distributed.start_all_reduce_mean([b for n in norms for b in (n.running_mean, n.running_var)])

    @torch.no_grad()
    def drift(self) -> Tensor:
        """How far the pending statistics are from the history; call it before `update`.

        The mean over norms, devices and channels of |mean − history's mean| + |std − history's std|, in units of the
        history's std. 0 if nothing is pending.
        """
        return drift_of(list(momentum_norms(self)))

    def encoder_state(self, prefix: str = "") -> dict[str, Tensor]:
        """A copy of the state with the keys of plain batch norm; with a prefix, of that submodule only."""
        module = self.network.get_submodule(prefix)
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _average_pending(norms: list[MomentumBatchNorm]) -> None:
    """Give all devices of all processes the mean of what they have seen."""
    pending = [part for n in norms for part in (n._pending_mean, n._pending_var, n._pending_count[None])]
    means = [part.mean(0) for part in pending]
    distributed.all_reduce_mean_(means)
    for part, mean in zip(pending, means, strict=True):
        part.copy_(mean)


def _unwrapped(student: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile's and DistributedDataParallel's wrappers."""
    student = getattr(student, "_orig_mod", student)
    if isinstance(student, nn.parallel.DistributedDataParallel):
        student = student.module
    return getattr(student, "_orig_mod", student)


def _matched(
    ours: Iterable[tuple[str, Tensor]], theirs: Iterable[tuple[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Both in the order of `ours`, if they have the same names and shapes."""
    mine, others = dict(ours), dict(theirs)
    shapes = [{name: t.shape for name, t in tensors.items()} for tensors in (mine, others)]
    if shapes[0] != shapes[1]:
        wrong = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
        raise UserError(
            "The student is not the network that the teacher was made from. These parameters are missing, new or of "
            f"a different shape: {', '.join(wrong)}."
        )
    return list(mine.values()), [others[name] for name in mine]


def _statistics(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n, t) for n, t in network.named_buffers() if n.endswith(("running_mean", "running_var")))


def _counts(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((n, t) for n, t in network.named_buffers() if n.endswith("num_batches_tracked"))
