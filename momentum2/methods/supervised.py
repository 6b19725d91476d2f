"""A classifier: the whole network with labels, or a linear head on a frozen encoder."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2.backbones import Encoder
from momentum2.config import Config, Network
from momentum2.heads import classifier
from momentum2.methods.method import Method, Output
from momentum2.norms import convert_norms
from momentum2.schedules import Schedule


class Supervised(Method):
    """Encoder f and head; with `freeze_encoder`, f stays as it is, its BN in evaluation mode."""

    needs_labels = True
    can_freeze = True
    views = range(1, 2)
    reads = frozenset({"method.freeze_encoder", "method.classifier_norm"})

    @classmethod
    def idle(cls, config: Config) -> set[str]:
        if not config.method.freeze_encoder:
            return super().idle(config) | {"method.classifier_norm"}
        return {"method.student_norm", "method.alpha", "method.alpha_base", "method.compat"}

    @classmethod
    def norms_in_heads(cls, config: Config) -> bool:
        return config.method.freeze_encoder and config.method.classifier_norm

    def __init__(self, config: Config, schedule: Schedule, f: Encoder, devices: int, classes: int) -> None:
        super().__init__(schedule)
        self.frozen = config.method.freeze_encoder
        self.encoder = f
        if self.frozen:
            f.requires_grad_(False)
            self.head: nn.Module = classifier(f.feature_dim, classes, config.method.classifier_norm)
        else:
            self.head = nn.Linear(f.feature_dim, classes)
            convert_norms(self.encoder, config.method.student_norm, devices, config.method.compat)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(self, views: list[Tensor], labels: Tensor | None) -> Output:
        assert labels is not None
        with torch.set_grad_enabled(not self.frozen):
            h = self.encoder(views[0])  # N×d
        logits = self.head(h).float()  # N×classes
        accuracy = (logits.argmax(1) == labels).float().mean()
        return Output(F.cross_entropy(logits, labels), h.detach(), {"accuracy": accuracy})

    def encoders(self) -> dict[Network, Encoder]:
        return {"student": self.encoder}
