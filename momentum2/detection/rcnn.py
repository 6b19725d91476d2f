"""The heads of the R-CNNs: one box branch (Faster and Mask R-CNN) or three (Cascade R-CNN), and perhaps masks.

Every stage of a cascade is trained on the boxes that the one before has refined. Labels are those of the data, from 0;
the background is the last class.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import distributed
from momentum2._torchvision import torchvision
from momentum2.detection.masks import mask_targets
from momentum2.detection.pool import Pool
from momentum2.detection.presets import HeadConfig
from momentum2.detection.proposals import sample
from momentum2.detection.targets import Target

_mask_rcnn = torchvision.models.detection.mask_rcnn
_ops = torchvision.ops
BoxCoder: Any = torchvision.models.detection._utils.BoxCoder

Size = tuple[int, int]  # height, width
_POSITIVE = 0.25  # largest share of a sample that are objects
_NMS = 0.5
#: Along a side of the box branch's squares; the mask branch takes twice and predicts four times as many.
_BINS = 7


class Rule(NamedTuple):
    """A box belongs to an object from `iou` on; `weights` multiply the offsets of x, y, w and h."""

    iou: float
    weights: tuple[float, float, float, float]


#: Later stages see better boxes, so they ask for more overlap and their offsets are smaller numbers.
CASCADE = (Rule(0.5, (10, 10, 5, 5)), Rule(0.6, (20, 20, 10, 10)), Rule(0.7, (30, 30, 15, 15)))
SINGLE = CASCADE[:1]


class Stage(nn.Module):
    """A box branch: squares of features (n, c, 7, 7) to scores (n, classes + 1) and offsets (n, 4 · boxes).

    Args:
        channels: c.
        width: Of its two linear layers.
        classes: Number of classes.
        boxes: Boxes that it predicts for each of its own: one per class, or one for all of them.
        rule: Its overlap and the scale of its offsets.
    """

    def __init__(self, channels: int, width: int, classes: int, boxes: int, rule: Rule) -> None:
        super().__init__()
        self.iou, self.coder = rule.iou, BoxCoder(rule.weights)
        self.fc6 = nn.Linear(channels * _BINS**2, width)
        self.fc7 = nn.Linear(width, width)
        self.cls_score = nn.Linear(width, classes + 1)
        self.bbox_pred = nn.Linear(width, 4 * boxes)
        for layer in (self.fc6, self.fc7):
            nn.init.kaiming_uniform_(layer.weight, a=1)
        nn.init.normal_(self.cls_score.weight, std=0.01)
        nn.init.normal_(self.bbox_pred.weight, std=0.001)
        for layer in (self.fc6, self.fc7, self.cls_score, self.bbox_pred):
            nn.init.zeros_(layer.bias)

    def forward(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.fc7(F.relu(self.fc6(squares.flatten(1)))))
        return self.cls_score(x), self.bbox_pred(x)

    def decode(self, deltas: Tensor, boxes: Tensor) -> Tensor:
        """Boxes (n, 4) moved by offsets (n, 4 · k), without a gradient: (n, k, 4)."""
        moved: Tensor = self.coder.decode_single(deltas.detach(), boxes)
        return _per_box(moved)


class Heads(nn.Module):
    """In the place of torchvision's `RoIHeads`, whose arguments and results it has.

    Args:
        strides: Of the pyramid's levels that boxes are pooled from.
        classes: Number of classes.
        config: Sizes.
        rules: `SINGLE` or `CASCADE`.
        masks: Whether there is a mask branch. It learns from the boxes of the first stage.
    """

    def __init__(
        self, strides: list[int], classes: int, config: HeadConfig, rules: tuple[Rule, ...], masks: bool
    ) -> None:
        super().__init__()
        channels, boxes = config.fpn_channels, classes if len(rules) == 1 else 1
        self.classes, self.config, self.strides = classes, config, strides
        self.box_pool = Pool(strides, _BINS, config.pool_samples)
        self.stages = nn.ModuleList(Stage(channels, config.box_width, classes, boxes, rule) for rule in rules)
        self.mask_pool = Pool(strides, 2 * _BINS, config.pool_samples)
        self.mask_branch: Any = None
        if masks:
            predictor = _mask_rcnn.MaskRCNNPredictor(channels, channels, classes)
            nn.init.normal_(predictor.mask_fcn_logits.weight, std=0.001)
            for layer in (predictor.conv5_mask, predictor.mask_fcn_logits):
                nn.init.zeros_(layer.bias)
            self.mask_branch = nn.Sequential(
                _mask_rcnn.MaskRCNNHeads(channels, (channels,) * 4, dilation=1), predictor
            )

    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[Size],
        targets: list[Target] | None = None,
    ) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        """Detections (in evaluation mode), masks as squares of probabilities (n, 28, 28), and losses (in training)."""
        maps = list(features.values())[: len(self.strides)]
        if self.training:
            assert targets is not None
            return [], self._losses(maps, proposals, sizes, targets)
        return self._detect(maps, proposals, sizes), {}

    def _losses(
        self, maps: list[Tensor], proposals: list[Tensor], sizes: list[Size], targets: list[Target]
    ) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        boxes, objects = self.sample(proposals, targets)
        first, refined = (boxes, objects), boxes
        for k, stage in enumerate(self._stages()):
            if k > 0:  # labeled anew, never sampled anew
                boxes = [b[~is_empty(b)] for b in refined]
                objects = [match(b, t["boxes"], stage.iou) for b, t in zip(boxes, targets, strict=True)]
            scores, deltas = self._branch(stage, maps, boxes)
            labels, positive = self._labels(objects, targets), torch.cat(objects) >= 0
            # Divided by what a process has on average: one process and several learn the same.
            count = on_average(len(labels), scores.device)
            name = f"_{k + 1}" if len(self.stages) > 1 else ""
            losses[f"loss_classifier{name}"] = F.cross_entropy(scores, labels, reduction="sum") / count
            truth = torch.cat([t["boxes"][o[o >= 0]] for t, o in zip(targets, objects, strict=True)])
            offsets = stage.coder.encode_single(truth, torch.cat(boxes)[positive])
            chosen = _of_class(_per_box(deltas)[positive], labels[positive])
            losses[f"loss_box_reg{name}"] = F.l1_loss(chosen, offsets, reduction="sum") / count
            if k + 1 < len(self.stages):
                refined = self._refine(stage, deltas, boxes, sizes)
        if self.mask_branch is not None:
            losses["loss_mask"] = self._mask_loss(maps, *first, sizes, targets)
        return losses

    def sample(self, proposals: list[Tensor], targets: list[Target]) -> tuple[list[Tensor], list[Tensor]]:
        """The boxes of each image to learn from, true ones among the candidates, and the object of each (or -1)."""
        boxes, objects = [], []
        for candidates, target in zip(proposals, targets, strict=True):
            every = torch.cat((candidates, target["boxes"].to(candidates)))
            matched = match(every, target["boxes"], self._stages()[0].iou)
            kept = sample((matched >= 0).long(), self.config.sampled, _POSITIVE, target["draw"], "boxes")
            boxes.append(every[kept])
            objects.append(matched[kept])
        return boxes, objects

    def _stages(self) -> list[Stage]:
        return list(self.stages)  # type: ignore[arg-type]

    def _branch(self, stage: Stage, maps: list[Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Scores and offsets; the stages average their gradients where they meet the features."""
        squares = self.box_pool(maps, boxes)
        share = 1 / len(self.stages)
        if share < 1:
            squares = squares * share + (squares * (1 - share)).detach()
        scores, deltas = stage(squares)
        return scores, deltas

    def _labels(self, objects: list[Tensor], targets: list[Target]) -> Tensor:
        """The class of each box, `classes` for the background: int64 (Σ n,)."""
        labels = []
        for found, target in zip(objects, targets, strict=True):
            known = torch.cat((target["labels"], target["labels"].new_tensor([self.classes])))
            labels.append(known[found])  # -1 is the last
        return torch.cat(labels)

    def _refine(self, stage: Stage, deltas: Tensor, boxes: list[Tensor], sizes: list[Size]) -> list[Tensor]:
        """The boxes of each image, moved by offsets that all classes share, inside the image."""
        moved = stage.decode(deltas, torch.cat(boxes))[:, 0].split([len(b) for b in boxes])
        return [_ops.clip_boxes_to_image(b, size) for b, size in zip(moved, sizes, strict=True)]

    def _mask_loss(
        self,
        maps: list[Tensor],
        boxes: list[Tensor],
        objects: list[Tensor],
        sizes: list[Size],
        targets: list[Target],
    ) -> Tensor:
        positive = [b[o >= 0] for b, o in zip(boxes, objects, strict=True)]
        objects = [o[o >= 0] for o in objects]
        logits = _of_class(self._masks(maps, positive), self._labels(objects, targets))
        side = logits.shape[-1]
        truth = torch.cat(
            [
                mask_targets(target["masks"], b, o, side, size)
                for target, b, o, size in zip(targets, positive, objects, sizes, strict=True)
            ]
        )
        loss = F.binary_cross_entropy_with_logits(logits, truth, reduction="sum")
        return loss / (on_average(len(truth), logits.device) * side**2)

    def _masks(self, maps: list[Tensor], boxes: list[Tensor]) -> Tensor:
        logits: Tensor = self.mask_branch(self.mask_pool(maps, boxes))
        return logits

    def _detect(
        self, maps: list[Tensor], proposals: list[Tensor], sizes: list[Size]
    ) -> list[dict[str, Tensor]]:
        boxes, probabilities = proposals, []
        *earlier, last = self._stages()
        for stage in earlier:
            scores, deltas = self._branch(stage, maps, boxes)
            probabilities.append(scores.softmax(1))
            # Empty boxes stay: the probabilities of the stages are averaged box by box.
            boxes = self._refine(stage, deltas, boxes, sizes)
        scores, deltas = self._branch(last, maps, boxes)
        probability = torch.stack([*probabilities, scores.softmax(1)]).mean(0)[:, :-1]
        counts = [len(b) for b in boxes]
        moved = last.decode(deltas, torch.cat(boxes)).split(counts)
        found = [
            self._best(_ops.clip_boxes_to_image(b, size), p)
            for b, p, size in zip(moved, probability.split(counts), sizes, strict=True)
        ]
        if self.mask_branch is not None:
            logits = self._masks(maps, [f["boxes"] for f in found])
            chosen = _of_class(logits, torch.cat([f["labels"] for f in found])).sigmoid()
            for f, mask in zip(found, chosen.split([len(f["labels"]) for f in found]), strict=True):
                f["masks"] = mask
        return found

    def _best(self, boxes: Tensor, probability: Tensor) -> dict[str, Tensor]:
        """The detections of one image from boxes (n, classes or 1, 4) and probabilities (n, classes)."""
        index, labels = (probability > self.config.score_threshold).nonzero().unbind(1)
        scores = probability[index, labels]
        boxes = boxes.expand(-1, self.classes, 4)[index, labels]
        keep = (~is_empty(boxes)).nonzero()[:, 0]
        order = _ops.batched_nms(boxes[keep], scores[keep], labels[keep], _NMS)[: self.config.detections]
        kept = keep[order]
        return {"boxes": boxes[kept], "labels": labels[kept], "scores": scores[kept]}


def match(boxes: Tensor, truth: Tensor, iou: float) -> Tensor:
    """The true box that each box overlaps most, -1 where that is less than `iou`: int64 (n,)."""
    if not len(truth):
        return torch.full((len(boxes),), -1, device=boxes.device)
    overlap, best = _ops.box_iou(boxes, truth).max(1)
    return torch.where(overlap >= iou, best, -1)


def is_empty(boxes: Tensor) -> Tensor:
    """Which of the boxes (n, 4) have no area: bool (n,)."""
    return (boxes[:, 2:] <= boxes[:, :2]).any(1)


def on_average(count: int, device: torch.device) -> Tensor:
    """The mean of a number over all processes, at least 1."""
    total = distributed.all_reduce_sum(torch.tensor(float(count), device=device))
    return (total / distributed.world_size()).clamp(min=1)


def _per_box(values: Tensor) -> Tensor:
    """(n, 4 · k) as (n, k, 4)."""
    return values.view(len(values), values.shape[1] // 4, 4)


def _of_class(values: Tensor, labels: Tensor) -> Tensor:
    """Of values (n, classes, ...), or (n, 1, ...) that all classes share, those of each row's class."""
    rows = torch.arange(len(labels), device=labels.device)
    return values[rows, labels if values.shape[1] > 1 else torch.zeros_like(labels)]
