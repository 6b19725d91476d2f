"""SimCLR: every other image of the batch is a negative."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.backbones import Encoder
from momentum2.config import Config, Network
from momentum2.heads import simclr_projector
from momentum2.methods.method import PROJECTOR, Output, ViewByView, encoder_of
from momentum2.methods.precision import without_autocast
from momentum2.norms import convert_norms
from momentum2.schedules import Schedule


def nt_xent(z1: Tensor, z2: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding each of 2N outputs' other view among the 2N−1 others of all processes."""
    n, rank = len(z1), distributed.rank()
    z = torch.cat([distributed.gather(z1), distributed.gather(z2)])  # 2M×d, M = N × processes
    M = len(z) // 2
    own = torch.arange(n, device=z.device) + rank * n  # rows of this process in each half
    rows = torch.cat([own, own + M])
    with without_autocast(z.device):  # it would round similarities to bf16
        logits = torch.cat([z1, z2]) @ z.T / temperature  # 2N×2M
    logits[torch.arange(2 * n, device=z.device), rows] = -torch.inf  # not itself
    return F.cross_entropy(logits, torch.cat([own + M, own]))


class SimCLR(ViewByView):
    """Encoder f and projector g."""

    reads = PROJECTOR | {"method.temperature"}

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        super().__init__(schedule)
        model, method = config.model, config.method
        g = simclr_projector(f.feature_dim, model.projector_hidden, model.projector_out)
        self.student = nn.Sequential(OrderedDict(encoder=f, projector=g))
        convert_norms(self.student, method.student_norm, devices, method.compat)
        self.temperature = method.temperature

    def encode(self, i: int, view: Tensor) -> tuple[Tensor, ...]:
        return (F.normalize(self.student(view).float(), dim=1),)  # N×d

    def meet(self, encoded: list[tuple[Tensor, ...]], labels: Tensor | None) -> Output:
        (z1,), (z2,) = encoded
        return Output(nt_xent(z1, z2, self.temperature), z1.detach(), {})

    def encoders(self) -> dict[Network, Encoder]:
        return {"student": encoder_of(self.student)}
