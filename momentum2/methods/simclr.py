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


def nt_xent(views: list[Tensor], temperature: float) -> Tensor:
    """Cross-entropy of finding each output's other views, one by one, among the outputs of other images.

    Of an image's views, only the one to be found is in the sum: the others are neither positives nor negatives of it.

    Args:
        views: V of N×d, of unit length; row i of each is image i. With two views, this is SimCLR's loss.
        temperature: Of the softmax. The other images are those of all processes.
    """
    V, n, device = len(views), len(views[0]), views[0].device
    z = torch.cat([distributed.gather(view) for view in views])  # VM×d, M = N × processes
    with without_autocast(device):  # it would round similarities to bf16
        logits = torch.cat(views) @ z.T / temperature  # VN×VM
    M, view = len(z) // V, torch.arange(V, device=device)
    image = torch.arange(n, device=device) + n * distributed.rank()  # of this process, in each view of z
    same = (image[:, None] + M * view).repeat(V, 1)  # VN×V: where in z the views of a row's image are
    row = view.repeat_interleave(n)[:, None]  # VN×1: which of them the row itself is
    positives = logits.gather(1, same.gather(1, (row + view[1:]) % V))  # VN×(V − 1)
    others = logits.scatter(1, same, -torch.inf).logsumexp(1, keepdim=True)  # the other images
    return F.softplus(others - positives).mean()  # −log eᵖ / (eᵖ + Σ eᵒ)


class SimCLR(ViewByView):
    """Encoder f and projector g."""

    views = range(2, 100_000)
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
        outputs = [z for (z,) in encoded]
        return Output(nt_xent(outputs, self.temperature), outputs[0].detach(), {})

    def encoders(self) -> dict[Network, Encoder]:
        return {"student": encoder_of(self.student)}
