"""The losses of RetinaNet and FCOS, divided by a moving average of the number of positives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import distributed
from momentum2._torchvision import torchvision
from momentum2.detection.targets import Target

_fcos = torchvision.models.detection.fcos
_retinanet = torchvision.models.detection.retinanet
RetinaNetHead: Any = _retinanet.RetinaNetHead
FCOSHead: Any = _fcos.FCOSHead
Matcher: Any = torchvision.models.detection._utils.Matcher

NormLayer = Callable[[int], nn.Module] | None
Named = dict[str, Tensor]
_KEPT = 0.9  # of the average in each step


class Positives(nn.Module):
    """Moving average of the positives per image, over the images of all processes and micro-batches of a step.

    A micro-batch of one or two images has few positives or none, and dividing by them would make its gradient large or
    small by chance.

    Args:
        start: The average before the first step.
    """

    mean: Tensor
    seen: Tensor

    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(start))
        self.register_buffer("seen", torch.zeros(2), persistent=False)  # positives, images; of this step

    def forward(self, positives: Tensor | int, images: int) -> Tensor:
        """What the losses of a micro-batch are divided by; in training it also counts."""
        if self.training:
            self.seen += torch.stack([torch.as_tensor(float(v)).to(self.seen) for v in (positives, images)])
        return self.mean * images

    def commit(self) -> None:
        """At the end of a step."""
        positives, images = distributed.all_reduce_sum(self.seen).unbind()
        self.mean.lerp_(positives.clamp(min=1) / images.clamp(min=1), 1 - _KEPT)
        self.seen.zero_()


class RetinaNetTowers(RetinaNetHead):  # type: ignore[misc]
    """torchvision's head of RetinaNet, with its losses summed over the images before they are divided."""

    def __init__(self, channels: int, anchors: int, classes: int, norm: NormLayer) -> None:
        super().__init__(channels, anchors, classes, norm_layer=norm)
        for layer in (*self.classification_head.conv.modules(), *self.regression_head.conv.modules()):
            if isinstance(layer, nn.Conv2d):
                # torchvision's 0.01 is for 256 channels; keep its gain with fewer.
                nn.init.normal_(layer.weight, std=0.01 * (256 / channels) ** 0.5)
        self.positives = Positives(50.0)

    def compute_loss(
        self, targets: list[Target], head_outputs: Named, anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> Named:
        """Focal loss of the classes and L1 of the offsets."""
        logits, deltas = head_outputs["cls_logits"], head_outputs["bbox_regression"]
        coder = self.regression_head.box_coder
        classes, boxes, count = logits.sum() * 0, deltas.sum() * 0, 0
        for i, (target, matched) in enumerate(zip(targets, matched_idxs, strict=True)):
            positive = (matched >= 0).nonzero()[:, 0]
            objects = matched[positive]
            truth = torch.zeros_like(logits[i])
            truth[positive, target["labels"][objects]] = 1
            judged = matched != Matcher.BETWEEN_THRESHOLDS
            classes = classes + torchvision.ops.sigmoid_focal_loss(
                logits[i][judged], truth[judged], reduction="sum"
            )
            offsets = coder.encode_single(target["boxes"][objects], anchors[i][positive])
            boxes = boxes + F.l1_loss(deltas[i][positive], offsets, reduction="sum")
            count += len(positive)
        divisor = self.positives(count, len(targets))
        return {"classification": classes / divisor, "bbox_regression": boxes / divisor}


class FCOSTowers(FCOSHead):  # type: ignore[misc]
    """torchvision's head of FCOS, with another divisor of its losses."""

    def __init__(self, channels: int, classes: int, norm: NormLayer) -> None:
        nn.Module.__init__(self)  # torchvision's own would make towers with group norm first
        norm = norm or nn.Identity  # which None means there
        self.box_coder = torchvision.models.detection._utils.BoxLinearCoder(normalize_by_size=True)
        self.classification_head = _fcos.FCOSClassificationHead(channels, 1, classes, norm_layer=norm)
        self.regression_head = _fcos.FCOSRegressionHead(channels, 1, norm_layer=norm)
        self.positives = Positives(150.0)

    def compute_loss(
        self, targets: list[Target], head_outputs: Named, anchors: list[Tensor], matched_idxs: list[Tensor]
    ) -> Named:
        """Focal loss of the classes, GIoU of the boxes and cross entropy of the centerness."""
        losses = super().compute_loss(targets, head_outputs, anchors, matched_idxs)
        count = sum(int((matched >= 0).sum()) for matched in matched_idxs)
        ratio = max(count, 1) / self.positives(count, len(targets))
        return {name: loss * ratio for name, loss in losses.items()}
