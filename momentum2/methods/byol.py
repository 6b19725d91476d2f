"""BYOL, and with it Momentum² Teacher: BYOL whose teacher normalizes with momentum statistics."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.backbones import Encoder
from momentum2.config import Config
from momentum2.errors import SettingError
from momentum2.heads import mlp
from momentum2.methods.method import Output, TeacherMethod, ViewByView
from momentum2.methods.precision import without_autocast
from momentum2.norms import convert_norms
from momentum2.schedules import Schedule


def distance(q: Tensor, z: Tensor) -> Tensor:
    """2 − 2·cos(q, z), mean over the batch (both N×d)."""
    return 2 - 2 * F.cosine_similarity(q.float(), z.float(), dim=1).mean()


def contrast(q: Tensor, z: Tensor, own: list[Tensor], temperature: float) -> Tensor:
    """Cross-entropy of finding each q's z among those of all processes and the student's outputs of other images.

    Args:
        q: N×d, the student's outputs of one view.
        z: N×d, the teacher's of another view, without gradient.
        own: N×d each, the student's of all V views. No gradient flows through them: two outputs would push each other
            away twice, while each is pulled to its z once, and that pull would be too weak.
        temperature: Of the softmax.
    """
    n = len(q)
    image = torch.arange(n, device=q.device) + n * distributed.rank()  # of q in the global batch
    q, *others = (F.normalize(x.float(), dim=1) for x in (q, z, *own))
    with without_autocast(q.device):  # it would round similarities to bf16
        # N×(1+V)×M, M = N × processes
        logits = torch.stack([q @ distributed.gather(x.detach()).T for x in others], dim=1) / temperature
    itself = torch.zeros_like(logits, dtype=torch.bool)
    itself[torch.arange(n, device=q.device), 1:, image] = True  # the student's outputs of the same image
    return F.cross_entropy(logits.masked_fill(itself, -torch.inf).flatten(1), image)


class BYOL(ViewByView, TeacherMethod):
    """The student's f, g, q learn to predict the teacher's f, g of the other view."""

    views = range(2, 100_000)  # v, v', and small crops
    reads = TeacherMethod.reads | {
        *("method.repulsion", "method.temperature"),
        *("method.predictor", "model.predictor_hidden"),
    }

    @classmethod
    def idle(cls, config: Config) -> set[str]:
        temperature = {"method.temperature"} if config.method.repulsion == "none" else set()
        predictor = set() if config.method.predictor else {"model.predictor_hidden"}
        return super().idle(config) | temperature | predictor

    @classmethod
    def check(cls, config: Config) -> None:
        if not config.method.predictor and config.method.repulsion == "none":
            raise SettingError(
                "method.predictor",
                "cannot be left out without repulsion: all images would get one output. Set method.repulsion to batch.",
            )

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        model, method = config.model, config.method
        d = model.projector_out
        super().__init__(config, schedule, f, mlp(f.feature_dim, model.projector_hidden, d), devices)
        self.predictor: nn.Module = nn.Identity()
        if method.predictor:
            self.predictor = mlp(d, model.predictor_hidden or model.projector_hidden, d)
            convert_norms(self.predictor, method.student_norm, devices, method.compat)
        self.repulsion, self.temperature = method.repulsion == "batch", method.temperature

    def encode(self, i: int, view: Tensor) -> tuple[Tensor, ...]:
        q = self.predictor(self.student(view))  # N×d
        # z' of v and v', not of small crops: N×d, no gradient, history frozen
        return (q, self.teacher(view)) if i < 2 else (q,)

    def meet(self, encoded: list[tuple[Tensor, ...]], labels: Tensor | None) -> Output:
        # q of v, v', and small crops if there are any; z' of v and v'
        predictions, targets = [each[0] for each in encoded], [each[1] for each in encoded[:2]]
        loss = torch.zeros((), device=targets[0].device)
        for i, q in enumerate(predictions):
            others = [z for j, z in enumerate(targets) if j != i]
            if self.repulsion:
                terms = [contrast(q, z, predictions, self.temperature) for z in others]
            else:
                terms = [distance(q, z) for z in others]
            loss = loss + torch.stack(terms).mean()
        return Output(loss, targets[0], {})
