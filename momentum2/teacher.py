"""The Momentum² teacher: a moving average of the student's weights and of its own batch statistics."""

import copy

import torch
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.config import Compat, History, NormName
from momentum2.errors import UserError
from momentum2.norms import convert_norms, momentum_norms


class MomentumTeacher(nn.Module):
    """A frozen copy of a student that follows it slowly, with batch norms of its own kind.

    One optimizer step: any number of forwards `z = teacher(view)`, without gradient; `optimizer.step()`; then
    `teacher.update(student, weight=m, statistics=alpha)`. Between two updates the teacher does not change,
    so views and micro-batches may come in any order and number.

    The copy starts in training mode, which Momentum BN needs; `eval()` is for evaluation.

    Args:
        student: Any network with batch norms, also wrapped in DistributedDataParallel or torch.compile.
        norm: The teacher's norms: "momentum" (the paper), or "batch", "split", "synced", whose running
            statistics then come from the forwards, as usual.
        history: Momentum BN's statistics per process ("local", the paper), or averaged over the processes at
            every update ("global"), by one collective outside the forward.
        devices: Virtual devices of "momentum" and "split".
        compat: "official" for the arithmetic of the authors' code.
    """

    def __init__(
        self,
        student: nn.Module,
        norm: NormName = "momentum",
        history: History = "local",
        devices: int = 1,
        compat: Compat = "paper",
    ) -> None:
        super().__init__()
        if history not in ("local", "global"):
            raise UserError(f"There is no history called {history!r}; choose local or global.")
        self.network = copy.deepcopy(_unwrapped(student))
        convert_norms(self, norm, devices, compat)
        self.requires_grad_(False)
        self.train()
        self.history = history

    @property
    def alpha(self) -> float:
        """Weight of the current batch against the history, in the forwards and in the update; 1 at first.

        Without Momentum BN it stays 1, which is what plain batch norm does.
        """
        return next((norm.alpha for norm in momentum_norms(self)), 1.0)

    @alpha.setter
    def alpha(self, value: float) -> None:
        for norm in momentum_norms(self):
            norm.alpha = value

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, student: nn.Module, weight: float, statistics: float | None = None) -> None:
        """Follow the student after its optimizer step, and commit the pending statistics.

        Args:
            student: The network this teacher was made from; its parameters are matched by name.
            weight: m, the share of the student in the new weights: (1 − m) · teacher + m · student.
            statistics: alpha of this commit and of the forwards after it; None leaves `self.alpha` as it is.
        """
        ours, theirs = self._matched(student)
        if not 0 <= weight <= 1:
            raise UserError(f"weight is the share of the student, between 0 and 1, not {weight}.")
        if statistics is not None:
            self.alpha = statistics
        norms = list(momentum_norms(self))
        for norm in norms:
            norm.commit()
        mean = None
        if self.history == "global":
            buffers = [b for norm in norms for b in (norm.running_mean, norm.running_var)]
            mean = distributed.start_all_reduce_mean(buffers)
        torch._foreach_lerp_(ours, theirs, weight)
        if mean is not None:
            mean.wait()

    def _matched(self, student: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        ours, theirs = dict(self.network.named_parameters()), dict(_unwrapped(student).named_parameters())
        shapes = [{name: p.shape for name, p in parameters.items()} for parameters in (ours, theirs)]
        if shapes[0] != shapes[1]:
            wrong = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})
            raise UserError(
                "Update the teacher with the network that it was made from: these parameters are missing, "
                f"new or of another shape: {', '.join(wrong)}."
            )
        return list(ours.values()), [theirs[name] for name in ours]

    @torch.no_grad()
    def drift(self) -> Tensor:
        """How far the pending statistics are from the history; call it before `update`.

        The mean over norms and channels of |mean − history's mean| + |std − history's std|, in units of the
        history's std. 0 where nothing is pending.
        """
        drifts = []
        for norm in momentum_norms(self):
            mean, var = norm.pending()
            std = (norm.running_var + norm.eps).sqrt()
            moved = (mean - norm.running_mean).abs() + ((var + norm.eps).sqrt() - std).abs()
            drifts.append((moved / std).mean() * norm.has_pending())
        return torch.stack(drifts).mean() if drifts else torch.zeros(())

    def encoder_state(self, prefix: str = "") -> dict[str, Tensor]:
        """A copy of the state with plain batch norm's keys; with a prefix, of that submodule alone."""
        module = self.network.get_submodule(prefix)
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def _unwrapped(student: nn.Module) -> nn.Module:
    """The user's own module inside torch.compile's and DistributedDataParallel's wrappers."""
    student = getattr(student, "_orig_mod", student)
    if isinstance(student, nn.parallel.DistributedDataParallel):
        student = student.module
    return getattr(student, "_orig_mod", student)
