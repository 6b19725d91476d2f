"""Cascade R-CNN's heads: three box heads, each trained on the boxes that the one before has refined.

Every stage is one of torchvision's `RoIHeads` with its own IoU threshold and its own scale of the box offsets.
As in Detectron2, box regression is shared by the classes, the gradients of the three heads are averaged where
they meet the features, and the class probabilities are averaged over the stages.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from momentum2._torchvision import torchvision
from momentum2.detection.targets import Target

_faster_rcnn = torchvision.models.detection.faster_rcnn
_roi_heads = torchvision.models.detection.roi_heads

Features = dict[str, Tensor]
Size = tuple[int, int]  # height, width
RoIHeads = Any  # torchvision has no types


class Stage(NamedTuple):
    """A proposal belongs to an object from `iou` on; `weights` multiply the offsets of x, y, w and h."""

    iou: float
    weights: tuple[float, float, float, float]


#: Later stages see better boxes, so they ask for more overlap and their offsets are smaller numbers.
STAGES = (Stage(0.5, (10, 10, 5, 5)), Stage(0.6, (20, 20, 10, 10)), Stage(0.7, (30, 30, 15, 15)))


class ClassAgnosticPredictor(nn.Module):
    """Class scores N×(K+1), and one box offset for all classes, repeated: N×4(K+1)."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.cls_score = nn.Linear(width, outputs)
        self.bbox_pred = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.cls_score(x)
        return scores, self.bbox_pred(x).repeat(1, scores.shape[1])


class CascadeRoIHeads(nn.Module):
    """In the place of a Mask R-CNN's `roi_heads`, whose poolers, mask branch and settings it takes over."""

    def __init__(self, mask_rcnn: RoIHeads, width: int, outputs: int) -> None:
        super().__init__()
        pool = mask_rcnn.box_roi_pool
        flat = mask_rcnn.box_head.fc6.in_features
        self.stages: Any = nn.ModuleList(
            _roi_heads.RoIHeads(
                box_roi_pool=pool,
                box_head=_faster_rcnn.TwoMLPHead(flat, width),
                box_predictor=ClassAgnosticPredictor(width, outputs),
                fg_iou_thresh=stage.iou,
                bg_iou_thresh=stage.iou,
                batch_size_per_image=mask_rcnn.fg_bg_sampler.batch_size_per_image,
                positive_fraction=mask_rcnn.fg_bg_sampler.positive_fraction,
                bbox_reg_weights=stage.weights,
                score_thresh=mask_rcnn.score_thresh,
                nms_thresh=mask_rcnn.nms_thresh,
                detections_per_img=mask_rcnn.detections_per_img,
            )
            for stage in STAGES
        )
        self.mask_roi_pool = mask_rcnn.mask_roi_pool
        self.mask_head = mask_rcnn.mask_head
        self.mask_predictor = mask_rcnn.mask_predictor

    def forward(
        self,
        features: Features,
        proposals: list[Tensor],
        sizes: list[Size],
        targets: list[Target] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections (in evaluation mode) and losses (in training mode), as torchvision's `RoIHeads` gives them."""
        if self.training:
            assert targets is not None
            return [], self._losses(features, proposals, sizes, targets)
        return self._detect(features, proposals, sizes), {}

    def _losses(
        self, features: Features, proposals: list[Tensor], sizes: list[Size], targets: list[Target]
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        truth = [t["boxes"] for t in targets]
        for k, stage in enumerate(self.stages, 1):
            # Adds the true boxes, labels everything by this stage's IoU and draws a new sample.
            sample, matched, labels, offsets = stage.select_training_samples(proposals, targets)
            scores, deltas = self._box_branch(stage, features, sample, sizes)
            losses[f"classifier_{k}"], losses[f"box_{k}"] = _roi_heads.fastrcnn_loss(
                scores, deltas, labels, offsets
            )
            if k == 1:
                losses["mask"] = self._mask_loss(features, sample, matched, labels, sizes, targets)
            proposals = [
                boxes[~is_among(before, true) & ~is_empty(boxes)]
                for boxes, before, true in zip(
                    refine(stage, deltas, sample, sizes), sample, truth, strict=True
                )
            ]
        return losses

    def _detect(
        self, features: Features, proposals: list[Tensor], sizes: list[Size]
    ) -> list[dict[str, Tensor]]:
        probability = torch.zeros(())
        for stage in self.stages:
            before = proposals
            scores, deltas = self._box_branch(stage, features, before, sizes)
            probability = probability.to(scores.device) + scores.softmax(1) / len(self.stages)
            proposals = refine(stage, deltas, before, sizes)
        # The last stage's own postprocessing takes logits: those of the averaged probabilities.
        found = stage.postprocess_detections(probability.log(), deltas, before, sizes)
        results = [{"boxes": b, "scores": s, "labels": c} for b, s, c in zip(*found, strict=True)]
        logits = self._mask_branch(features, [r["boxes"] for r in results], sizes)
        masks = _roi_heads.maskrcnn_inference(logits, [r["labels"] for r in results])
        return [{**result, "masks": mask} for result, mask in zip(results, masks, strict=True)]

    def _box_branch(
        self, stage: RoIHeads, features: Features, boxes: list[Tensor], sizes: list[Size]
    ) -> tuple[Tensor, Tensor]:
        """Class scores N×(K+1) and box offsets N×4(K+1) of one stage, N over all images."""
        pooled = stage.box_roi_pool(features, boxes, sizes)
        pooled = pooled / len(self.stages) + (pooled * (1 - 1 / len(self.stages))).detach()
        scores, deltas = stage.box_predictor(stage.box_head(pooled))
        return scores, deltas

    def _mask_branch(self, features: Features, boxes: list[Tensor], sizes: list[Size]) -> Tensor:
        logits: Tensor = self.mask_predictor(self.mask_head(self.mask_roi_pool(features, boxes, sizes)))
        return logits

    def _mask_loss(
        self,
        features: Features,
        sample: list[Tensor],
        matched: list[Tensor],
        labels: list[Tensor],
        sizes: list[Size],
        targets: list[Target],
    ) -> Tensor:
        """Loss of the masks of the first stage's positive boxes."""
        positive = [label > 0 for label in labels]
        boxes = [b[p] for b, p in zip(sample, positive, strict=True)]
        objects = [m[p] for m, p in zip(matched, positive, strict=True)]
        logits = self._mask_branch(features, boxes, sizes)
        masks, classes = [t["masks"] for t in targets], [t["labels"] for t in targets]
        loss: Tensor = _roi_heads.maskrcnn_loss(logits, boxes, masks, classes, objects)
        return loss


def refine(stage: RoIHeads, deltas: Tensor, boxes: list[Tensor], sizes: list[Size]) -> list[Tensor]:
    """Move boxes by the offsets (N×4 or more, the first four count), within the image, without a gradient."""
    moved = stage.box_coder.decode_single(deltas[:, :4].detach(), torch.cat(boxes))
    parts = moved.split([len(b) for b in boxes])
    return [torchvision.ops.clip_boxes_to_image(b, size) for b, size in zip(parts, sizes, strict=True)]


def is_among(boxes: Tensor, others: Tensor) -> Tensor:
    """Which of the boxes (n, 4) equal one of the others bit by bit: bool (n,)."""
    return (boxes[:, None] == others[None].to(boxes.dtype)).all(2).any(1)


def is_empty(boxes: Tensor) -> Tensor:
    """Which of the boxes (n, 4) have no area: bool (n,)."""
    return (boxes[:, 2:] <= boxes[:, :2]).any(1)
