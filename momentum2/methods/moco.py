"""MoCo v2: one key per query, against a queue of earlier keys."""

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2 import distributed
from momentum2.backbones import Encoder
from momentum2.config import Config
from momentum2.errors import SettingError
from momentum2.heads import mlp
from momentum2.methods.method import Output, TeacherMethod, ViewByView
from momentum2.methods.precision import without_autocast
from momentum2.norms import shuffled
from momentum2.norms.shuffle import draw_permutation
from momentum2.schedules import Schedule
from momentum2.seeds import derive


def info_nce(q: Tensor, k: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of finding each query's own key (N×d) among the queue's (K×d); all of unit length."""
    positive = (q * k).sum(1, keepdim=True)  # N×1
    with without_autocast(q.device):  # it would round them to bf16
        negative = q @ queue.T  # N×K
    logits = torch.cat([positive, negative], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=q.device))


class MoCo(ViewByView, TeacherMethod):
    """The teacher gives the keys, with shuffled, momentum or plain statistics."""

    teacher_norms = TeacherMethod.teacher_norms | {"shuffle"}
    reads = TeacherMethod.reads | {"method.queue_size", "method.temperature"}
    queue: Tensor
    pointer: Tensor

    @classmethod
    def norms_in_heads(cls, config: Config) -> bool:
        return False

    @classmethod
    def check(cls, config: Config) -> None:
        size, batch = config.method.queue_size, config.train.batch_size
        if size < batch:
            raise SettingError("method.queue_size", f"must be at least the batch size, {batch}, not {size}.")

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        model, method = config.model, config.method
        g = mlp(f.feature_dim, model.projector_hidden, model.projector_out, norm=False)
        super().__init__(config, schedule, f, g, devices)
        self.temperature = method.temperature
        self.shuffle, self.seed = method.teacher_norm == "shuffle", config.train.seed
        self.order = torch.Generator().get_state()  # of the permutations; not a buffer: it stays on the CPU
        self.register_buffer("queue", F.normalize(torch.randn(method.queue_size, model.projector_out), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.keys: list[Tensor] = []  # of the micro-batches of this step

    def before_step(self, k: int) -> None:
        super().before_step(k)
        # The same on all processes.
        self.order = torch.Generator().manual_seed(derive(self.seed, k, "shuffle")).get_state()

    def encode(self, i: int, view: Tensor) -> tuple[Tensor, ...]:
        if i == 0:
            z = self.student(view)
        elif self.shuffle:
            order = draw_permutation(self.order, len(view) * distributed.world_size())
            z = shuffled(self.teacher, view, order)
        else:
            z = self.teacher(view)
        return (F.normalize(z.float(), dim=1),)  # N×d; the teacher's without gradient

    def meet(self, encoded: list[tuple[Tensor, ...]], labels: Tensor | None) -> Output:
        (q,), (k,) = encoded
        return Output(info_nce(q, k, self.queue, self.temperature), q.detach(), {}, k)

    def keep(self, output: Output) -> None:
        assert output.kept is not None
        self.keys.append(output.kept)

    @torch.no_grad()
    def after_step(self, k: int) -> None:
        super().after_step(k)
        keys = torch.cat([distributed.gather(k) for k in self.keys])  # in the order of the global batch
        self.keys.clear()
        rows = (self.pointer + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue[rows] = keys
        self.pointer.copy_((self.pointer + len(keys)) % len(self.queue))
