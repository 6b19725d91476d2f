"""SimSiam: no teacher, only a stopped gradient."""

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from momentum2.backbones import Encoder
from momentum2.config import Config, Network
from momentum2.heads import mlp, simsiam_projector
from momentum2.methods.method import PROJECTOR, Output, ViewByView, encoder_of
from momentum2.norms import convert_norms
from momentum2.schedules import Schedule


def D(p: Tensor, z: Tensor) -> Tensor:
    """Negative cosine similarity to the other view, whose gradient is stopped."""
    return -F.cosine_similarity(p.float(), z.detach().float(), dim=1).mean()


class SimSiam(ViewByView):
    """Encoder f (backbone and projector) and predictor h."""

    reads = PROJECTOR | {"model.predictor_hidden"}
    constant_lr = ("h.",)  # the paper keeps the predictor's learning rate: it must follow f's newest output

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        super().__init__(schedule)
        model, method = config.model, config.method
        d = model.projector_out
        projector = simsiam_projector(f.feature_dim, model.projector_hidden, d)
        self.f = nn.Sequential(OrderedDict(encoder=f, projector=projector))
        self.h = mlp(d, model.predictor_hidden or model.projector_hidden, d)
        for network in (self.f, self.h):
            convert_norms(network, method.student_norm, devices, method.compat)

    def encode(self, i: int, view: Tensor) -> tuple[Tensor, ...]:
        z = self.f(view)  # N×d
        return z, self.h(z)  # N×d

    def meet(self, encoded: list[tuple[Tensor, ...]], labels: Tensor | None) -> Output:
        (z1, p1), (z2, p2) = encoded
        return Output(D(p1, z2) / 2 + D(p2, z1) / 2, z1.detach(), {})

    def encoders(self) -> dict[Network, Encoder]:
        return {"student": encoder_of(self.f)}
