"""BYOL, and with it Momentum² Teacher: BYOL whose teacher normalises with momentum statistics."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2.backbones import Encoder
from momentum2.config import Config
from momentum2.heads import mlp
from momentum2.methods.method import Method, Output
from momentum2.norms import convert_norms
from momentum2.schedules import Schedule
from momentum2.teacher import MomentumTeacher


def distance(q: Tensor, z: Tensor) -> Tensor:
    """2 − 2·cos(q, z), mean over the batch."""
    return 2 - 2 * F.cosine_similarity(q.float(), z.float(), dim=1).mean()


class BYOL(Method):
    """Student f, g, q learns to predict the teacher's f, g of the other view."""

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        super().__init__(schedule)
        model, method = config.model, config.method
        hidden, d = model.projector_hidden, model.projector_out
        g = mlp(f.feature_dim, hidden, d)
        self.student = nn.Sequential(OrderedDict(encoder=f, projector=g))
        self.predictor = mlp(d, model.predictor_hidden or hidden, d)
        for network in (self.student, self.predictor):
            convert_norms(network, method.student_norm, devices, method.compat)
        norm = method.teacher_norm
        self.teacher = MomentumTeacher(self.student, norm, method.history, devices, method.compat)

    def before_step(self, k: int) -> None:
        self.teacher.alpha = self.schedule.alpha(k)

    def forward(self, views: list[Tensor], labels: Tensor | None, shuffle: torch.Generator) -> Output:
        targets = [self.teacher(v) for v in views[:2]]  # z': N×d each, no gradient, history frozen
        loss = torch.zeros((), device=views[0].device)
        for i, v in enumerate(views):  # two views; small crops, if any, follow and have no target of their own
            z = self.student(v)  # N×d
            q = self.predictor(z)  # N×d
            others = [t for j, t in enumerate(targets) if j != i]
            loss = loss + sum(distance(q, t) for t in others) / len(others)
        return Output(loss, z.detach(), {})

    def after_step(self, k: int) -> None:
        self.teacher.update(self.student, weight=self.schedule.m(k))  # ξ ← (1−m)ξ + mθ, then the commit

    def encoders(self) -> dict[str, nn.Module]:
        return {"student": self.student.encoder, "teacher": self.teacher.network.encoder}

    def drift(self) -> Tensor | None:
        return self.teacher.drift()
