"""BYOL, and with it Momentum² Teacher: BYOL whose teacher normalizes with momentum statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.backbones import Encoder
from momentum2.config import Config
from momentum2.heads import mlp
from momentum2.methods.method import Output, TeacherMethod, ViewByView
from momentum2.norms import convert_norms
from momentum2.schedules import Schedule


def distance(q: Tensor, z: Tensor) -> Tensor:
    """2 − 2·cos(q, z), mean over the batch (both N×d)."""
    return 2 - 2 * F.cosine_similarity(q.float(), z.float(), dim=1).mean()


class BYOL(ViewByView, TeacherMethod):
    """The student's f, g, q learn to predict the teacher's f, g of the other view."""

    views = range(2, 1000)  # v, v', and small crops

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        model, method = config.model, config.method
        d = model.projector_out
        super().__init__(config, schedule, f, mlp(f.feature_dim, model.projector_hidden, d), devices)
        self.predictor = mlp(d, model.predictor_hidden or model.projector_hidden, d)
        convert_norms(self.predictor, method.student_norm, devices, method.compat)

    def encode(self, i: int, view: Tensor) -> tuple[Tensor, ...]:
        q = self.predictor(self.student(view))  # N×d
        # z' of v and v', not of small crops: N×d, no gradient, history frozen
        return (q, self.teacher(view)) if i < 2 else (q,)

    def meet(self, encoded: list[tuple[Tensor, ...]], labels: Tensor | None) -> Output:
        targets = [z for _, z in encoded[:2]]
        loss = torch.zeros((), device=targets[0].device)
        for i, (q, *_) in enumerate(encoded):  # v, v', and small crops if there are any
            others = [z for j, z in enumerate(targets) if j != i]
            loss = loss + torch.stack([distance(q, z) for z in others]).mean()
        return Output(loss, targets[0], {})
