"""The region proposal network, and which boxes of an image are learned from."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2._torchvision import torchvision
from momentum2.detection.targets import Target
from momentum2.seeds import derive

_rpn = torchvision.models.detection.rpn
RegionProposalNetwork: Any = _rpn.RegionProposalNetwork

_ANCHORS = 256  # of an image that are learned from


def sample(labels: Tensor, count: int, positive: float, draw: int, what: str) -> Tensor:
    """Indices of at most `count` boxes to learn from, at most the share `positive` of them objects.

    Args:
        labels: Of each box (n,): below 0 for one that is left out, 0 for background, above for an object.
        count: How many.
        positive: Largest share of objects.
        draw: The seed of the image's draws: a sample does not depend on the other images, nor on their processes.
        what: What is sampled, so that two samples of an image have nothing in common.
    """
    generator = torch.Generator().manual_seed(derive(draw, what))
    objects, others = (labels > 0).nonzero()[:, 0], (labels == 0).nonzero()[:, 0]
    first = _some(objects, int(count * positive), generator)
    return torch.cat((first, _some(others, count - len(first), generator)))


def _some(indices: Tensor, count: int, generator: torch.Generator) -> Tensor:
    order = torch.randperm(len(indices), generator=generator)[:count]
    return indices[order.to(indices.device)]


class Proposals(RegionProposalNetwork):  # type: ignore[misc]
    """torchvision's network with detectron2's losses: L1, divided by the anchors that an image may have sampled.

    Args:
        anchors: The anchors of the levels.
        channels: Of every level.
        train: Proposals per image in training; twice the number of `test` are looked at on each level.
        test: Proposals per image in evaluation.
    """

    def __init__(self, anchors: Any, channels: int, train: int, test: int) -> None:
        super().__init__(
            anchors,
            _rpn.RPNHead(channels, anchors.num_anchors_per_location()[0]),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=_ANCHORS,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2 * test, "testing": test},
            post_nms_top_n={"training": train, "testing": test},
            nms_thresh=0.7,
        )

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[Target]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Label (1, 0 or -1) and true box of each anchor; the labels that were not sampled are -1."""
        labels, truth = super().assign_targets_to_anchors(anchors, targets)
        chosen = []
        for label, target in zip(labels, targets, strict=True):
            kept = sample(label, _ANCHORS, 0.5, target["draw"], "anchors")
            chosen.append(torch.full_like(label, -1).index_copy(0, kept, label[kept]))
        return chosen, truth

    def compute_loss(
        self, objectness: Tensor, deltas: Tensor, labels: list[Tensor], offsets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Losses of objectness and boxes."""
        label, divisor = torch.cat(labels), _ANCHORS * len(labels)
        chosen, positive = label >= 0, label > 0
        found = F.binary_cross_entropy_with_logits(
            objectness.flatten()[chosen], label[chosen], reduction="sum"
        )
        moved = F.l1_loss(deltas[positive], torch.cat(offsets)[positive], reduction="sum")
        return found / divisor, moved / divisor
