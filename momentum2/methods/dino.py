"""DINO: the student learns the teacher's soft assignment of another view to prototypes, without negatives."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.backbones import Encoder
from momentum2.config import Config
from momentum2.methods.method import Output, TeacherMethod, ViewByView
from momentum2.methods.precision import without_autocast
from momentum2.schedules import Schedule

#: Width before the prototypes.
BOTTLENECK = 256


class Prototypes(nn.Linear):
    """Cosines between x (N×d) and each of K prototypes: a last layer whose weight norm is fixed at 1."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with without_autocast(x.device):  # it would round cosines to bf16, and a temperature makes them large
            return F.linear(F.normalize(x.to(self.weight.dtype), dim=1), F.normalize(self.weight, dim=1))


def dino_projector(inputs: int, hidden: int, outputs: int, norm: bool) -> nn.Sequential:
    """Three layers with GELU, started at N(0, 0.02²) and bias 0, and the prototypes; with `norm`, BN before GELU."""
    layers: list[nn.Module] = []
    for width in (inputs, hidden):
        layers += [nn.Linear(width, hidden), *([nn.BatchNorm1d(hidden)] if norm else []), nn.GELU()]
    layers.append(nn.Linear(hidden, BOTTLENECK))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
    prototypes = Prototypes(BOTTLENECK, outputs)
    return nn.Sequential(OrderedDict(mlp=nn.Sequential(*layers), prototypes=prototypes))


class DINO(ViewByView, TeacherMethod):
    """The teacher sees the two large views, the student all; every pair of different views is a term."""

    views = range(2, 100_000)
    reads = TeacherMethod.reads | {
        *(
            "method.temperature",
            "method.center_momentum",
            "method.freeze_last_layer",
            "method.projector_norm",
        ),
        *(f"method.teacher_temperature{part}" for part in ("", "_start", "_warmup")),
    }
    center: Tensor
    teacher_temperature: Tensor

    @classmethod
    def idle(cls, config: Config) -> set[str]:
        start = set() if config.method.teacher_temperature_warmup else {"method.teacher_temperature_start"}
        return super().idle(config) | start

    @classmethod
    def norms_in_heads(cls, config: Config) -> bool:
        return config.method.projector_norm

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        model, method = config.model, config.method
        d = model.projector_out
        g = dino_projector(f.feature_dim, model.projector_hidden, d, method.projector_norm)
        super().__init__(config, schedule, f, g, devices)
        self.temperature, self.center_momentum = method.temperature, method.center_momentum
        self.start, self.end = method.teacher_temperature_start, method.teacher_temperature
        self.warmup = round(method.teacher_temperature_warmup * schedule.K)
        self.register_buffer("center", torch.zeros(d))
        # Of the step that is taken, and in a tensor: a number would have a compiled network compiled again.
        self.register_buffer("teacher_temperature", torch.tensor(self.end), persistent=False)
        self.means: list[Tensor] = []  # of the teacher's outputs, by micro-batch of this step
        self.frozen_steps, self.moves = round(method.freeze_last_layer * schedule.K), True
        # Not requires_grad, which DistributedDataParallel and the optimizer read once.
        prototypes = self.student.get_parameter("projector.prototypes.weight")
        prototypes.register_hook(lambda gradient: gradient if self.moves else torch.zeros_like(gradient))

    def tau(self, k: int) -> float:
        """The teacher's temperature at step k: linear from its start to its end, then constant."""
        return self.end if k >= self.warmup else self.start + (self.end - self.start) * k / self.warmup

    def before_step(self, k: int) -> None:
        super().before_step(k)
        self.teacher_temperature.fill_(self.tau(k))
        self.moves = k >= self.frozen_steps

    def encode(self, i: int, view: Tensor) -> tuple[Tensor, ...]:
        log_q = F.log_softmax(self.student(view) / self.temperature, dim=1)  # N×d
        # The teacher sees no small crops: N×d, no gradient, history frozen
        return (log_q, self.teacher(view)) if i < 2 else (log_q,)

    def meet(self, encoded: list[tuple[Tensor, ...]], labels: Tensor | None) -> Output:
        t = torch.stack([t for _, t in encoded[:2]])  # 2×N×d
        p = F.softmax((t - self.center) / self.teacher_temperature, dim=2)  # 2×N×d
        terms = []
        for j, (log_q, *_) in enumerate(encoded):  # the two large views, and small crops if there are any
            terms += [-(p[i] * log_q).sum(1).mean() for i in range(2) if i != j]
        entropy = torch.special.entr(p).sum(2).mean()
        # Not t, which may have much in common that the center takes away: collapsed are equal assignments.
        return Output(torch.stack(terms).mean(), p[0], {"teacher_entropy": entropy}, t.mean((0, 1)))

    def keep(self, output: Output) -> None:
        assert output.kept is not None
        self.means.append(output.kept)

    @torch.no_grad()
    def after_step(self, k: int) -> None:
        """As every teacher method, and c ← m_c·c + (1 − m_c)·mean of the teacher's outputs in this step."""
        super().after_step(k)
        mean = torch.stack(self.means).mean(0)
        self.means.clear()
        distributed.all_reduce_mean_([mean])
        self.center.lerp_(mean, 1 - self.center_momentum)

    def watch(self, k: int) -> dict[str, float | Tensor]:
        return {**super().watch(k), "teacher_temperature": self.tau(k)}
