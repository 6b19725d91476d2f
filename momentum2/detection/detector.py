"""A detector as the training loop sees it."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from momentum2.backbones import Encoder
from momentum2.config import Network
from momentum2.detection.models import Pyramid
from momentum2.detection.targets import Detections, Target
from momentum2.methods import Method
from momentum2.methods.method import Output
from momentum2.schedules import Schedule


class Detector(Method):
    """One of torchvision's detectors with labels from 0.

    Args:
        model: The detector.
        two_stage: It is an R-CNN: its class 0 is the background, and it finds masks.
    """

    def __init__(self, model: nn.Module, two_stage: bool) -> None:
        super().__init__(Schedule(K=1, lr_base=0.0))  # no norm here follows a schedule
        self.model = model
        self.masks = two_stage
        self.first_label = 1 if two_stage else 0

    def forward(self, images: list[Tensor], targets: list[Target]) -> Output:  # type: ignore[override]
        """Sum of the detector's losses; images are (3, h, w) in [0, 1]."""
        shifted: list[Target] = [{**t, "labels": t["labels"] + self.first_label} for t in targets]
        losses: dict[str, Tensor] = self._run(images, shifted)
        metrics = {name.removeprefix("loss_"): loss.detach() for name, loss in losses.items()}
        return Output(torch.stack(list(losses.values())).sum(), None, metrics)

    @torch.no_grad()
    def detect(self, image: Tensor) -> Detections:
        """What one image (3, h, w) in [0, 1] shows, best first; in evaluation mode."""
        (found,) = self._run([image])
        labels = found["labels"] - self.first_label
        result = Detections(boxes=found["boxes"], labels=labels, scores=found["scores"])
        if "masks" in found:
            result["masks"] = found["masks"][:, 0] > 0.5  # the probability of each pixel
        return result

    def _run(self, images: list[Tensor], targets: list[Target] | None = None) -> Any:
        """The model, only its backbone in bf16 under autocast: a box in bf16 is off by pixels."""
        kind = images[0].device.type
        cast(Pyramid, self.model.get_submodule("backbone")).bf16 = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            return self.model(images, targets)

    def encoders(self) -> dict[Network, Encoder]:
        return {"student": cast(Encoder, self.model.get_submodule("backbone.body"))}
