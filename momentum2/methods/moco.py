"""MoCo v2: one key per query, against a queue of earlier keys."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.backbones import Encoder
from momentum2.config import Config
from momentum2.heads import mlp
from momentum2.methods.method import Method, Output
from momentum2.norms import convert_norms, shuffled
from momentum2.schedules import Schedule
from momentum2.teacher import MomentumTeacher


def info_nce(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding each query's own key (N×d) among the queue's (K×d); all of unit length."""
    positive = (q * k).sum(1, keepdim=True)  # N×1
    negative = q @ queue.T  # N×K
    logits = torch.cat([positive, negative], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


class MoCo(Method):
    """The teacher gives the keys; its statistics are shuffled, momentum or plain."""

    queue: Tensor
    pointer: Tensor

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        super().__init__(schedule)
        model, method = config.model, config.method
        g = mlp(f.feature_dim, model.projector_hidden, model.projector_out, norm=False)
        self.student = nn.Sequential(OrderedDict(encoder=f, projector=g))
        convert_norms(self.student, method.student_norm, devices, method.compat)
        self.shuffle, self.devices = method.teacher_norm == "shuffle", devices
        teacher_norm = "split" if method.teacher_norm == "shuffle" else method.teacher_norm
        self.teacher = MomentumTeacher(self.student, teacher_norm, method.history, devices, method.compat)
        self.temperature = method.temperature
        self.register_buffer("queue", F.normalize(torch.randn(method.queue_size, model.projector_out), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.keys: list[Tensor] = []  # of the micro-batches of this step

    def before_step(self, k: int) -> None:
        self.teacher.alpha = self.schedule.alpha(k)

    def forward(self, views: list[Tensor], labels: Tensor | None, shuffle: torch.Generator) -> Output:
        q = F.normalize(self.student(views[0]).float(), dim=1)  # N×d
        with torch.no_grad():
            if self.shuffle:
                k = shuffled(self.teacher, views[1], shuffle, self.devices)
            else:
                k = self.teacher(views[1])
            k = F.normalize(k.float(), dim=1)  # N×d
        self.keys.append(k)
        return Output(info_nce(q, k, self.queue.clone(), self.temperature), q.detach(), {})

    @torch.no_grad()
    def after_step(self, k: int) -> None:
        self.teacher.update(self.student, weight=self.schedule.m(k))
        keys = distributed.gather(torch.cat(self.keys))  # in the order of the global batch
        self.keys.clear()
        rows = (self.pointer + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[rows] = keys
        self.pointer.copy_((self.pointer + len(keys)) % len(self.queue))

    def encoders(self) -> dict[str, nn.Module]:
        return {"student": self.student.encoder, "teacher": self.teacher.network.encoder}

    def drift(self) -> Tensor | None:
        return self.teacher.drift()
