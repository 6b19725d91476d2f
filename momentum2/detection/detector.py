"""A detector as the training loop sees it."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from momentum2.backbones import Encoder
from momentum2.config import Network
from momentum2.detection.dense import Positives
from momentum2.detection.masks import paste
from momentum2.detection.models import Pyramid
from momentum2.detection.rcnn import Heads
from momentum2.detection.targets import Detections, Target
from momentum2.detection.transforms import resize, resize_boxes, scaled_size
from momentum2.methods import Method
from momentum2.methods.method import Output
from momentum2.schedules import Schedule


class Detector(Method):
    """A detector and the size of the images that it is shown.

    Args:
        model: What `build_detector` makes.
        short_edge: Short edge of an image in evaluation, or less where the other would be longer than `max_long_edge`.
        max_long_edge: See short_edge.
    """

    def __init__(self, model: nn.Module, short_edge: int, max_long_edge: int) -> None:
        super().__init__(Schedule(K=1, lr_base=0.0))  # no norm here follows a schedule
        self.model, self.short_edge, self.max_long_edge = model, short_edge, max_long_edge

    @property
    def masks(self) -> bool:
        """Whether it finds masks."""
        heads = getattr(self.model, "roi_heads", None)
        return isinstance(heads, Heads) and heads.mask_branch is not None

    def forward(self, images: list[Tensor], targets: list[Target]) -> Output:  # type: ignore[override]
        """Sum of the detector's losses; images are (3, h, w) in [0, 1], of the size that they should have."""
        losses: dict[str, Tensor] = self._run(images, targets)
        metrics = {name.removeprefix("loss_"): loss.detach() for name, loss in losses.items()}
        return Output(torch.stack(list(losses.values())).sum(), None, metrics)

    def after_step(self, k: int) -> None:
        """Also commit the counts of what dense detectors learn from."""
        super().after_step(k)
        for part in self.modules():
            if isinstance(part, Positives):
                part.commit()

    @torch.no_grad()
    def detect(self, image: Tensor) -> Detections:
        """What one image (3, h, w) in [0, 1] of any size shows, in its pixels, best first; in evaluation mode."""
        height, width = image.shape[1:]
        size = scaled_size(height, width, self.short_edge, self.max_long_edge)
        (found,) = self._run([resize(image, size)])
        boxes = resize_boxes(found["boxes"], size, (height, width))
        result = Detections(boxes=boxes, labels=found["labels"], scores=found["scores"])
        if "masks" in found:
            result["masks"] = paste(found["masks"], boxes, height, width)
        return result

    def _run(self, images: list[Tensor], targets: list[Target] | None = None) -> Any:
        """The model, only its backbone in bf16 under autocast: a box in bf16 is off by pixels."""
        kind = images[0].device.type
        cast(Pyramid, self.model.get_submodule("backbone")).bf16 = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False):
            return self.model(images, targets)

    def encoders(self) -> dict[Network, Encoder]:
        return {"student": cast(Encoder, self.model.get_submodule("backbone.body"))}
