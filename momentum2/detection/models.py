"""The detectors, put together from torchvision's parts and our own on a feature pyramid of our encoder."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from momentum2._torchvision import torchvision
from momentum2.detection.dense import FCOSTowers, NormLayer, RetinaNetTowers
from momentum2.detection.maps import Maps, maps_of
from momentum2.detection.presets import TWO_STAGE, WITH_MASKS, DetectorName, HeadConfig
from momentum2.detection.proposals import Proposals
from momentum2.detection.rcnn import CASCADE, SINGLE, Heads
from momentum2.detection.targets import Target
from momentum2.errors import SettingError, UserError
from momentum2.norms import SyncedBatchNorm, convert_norms

_detection = torchvision.models.detection
_pyramid = torchvision.ops.feature_pyramid_network
AnchorGenerator: Any = _detection.anchor_utils.AnchorGenerator
Transform: Any = _detection.transform.GeneralizedRCNNTransform

Extra = Literal["subsampled", "map", "level"]
_RATIOS = (0.5, 1.0, 2.0)  # height / width of the anchors
_MEAN, _STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Pyramid(nn.Module):
    """The maps of an encoder and the feature pyramid on them; all batch norms are synced and trained.

    Args:
        body: The encoder's maps.
        count: How many of them to build on, the coarsest ones.
        channels: Channels of every level.
        extra: Levels beyond: one, subsampled from the last (R-CNNs), or two that are computed (P6, P7), from the last
            map (RetinaNet) or from its level (FCOS).

    Attributes:
        out_channels: Channels of every level (the name that torchvision asks for).
        strides: Pixels of the image per cell, of every level.
        bf16: Compute in bf16; the levels come out in fp32 all the same.
    """

    bf16 = False

    def __init__(self, body: Maps, count: int, channels: int, extra: Extra) -> None:
        super().__init__()
        if len(body.strides) < count:
            raise UserError(f"The backbone has {len(body.strides)} maps, but this detector needs {count}.")
        self.body, self.count = body, count
        convert_norms(self.body, "synced")
        widths = list(body.channels[-count:])
        top: Any = _pyramid.LastLevelMaxPool()
        if extra != "subsampled":
            top = _pyramid.LastLevelP6P7(widths[-1] if extra == "map" else channels, channels)
            top.use_P5 = extra == "level"  # torchvision guesses it from the widths
        self.fpn = _pyramid.FeaturePyramidNetwork(widths, channels, top, norm_layer=SyncedBatchNorm)
        self.out_channels = channels
        self.strides = list(body.strides[-count:])
        self.strides += [self.strides[-1] * 2**i for i in ((1,) if extra == "subsampled" else (1, 2))]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Levels of n × out_channels × h/stride × w/stride, finest first."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            maps = self.body(images)[-self.count :]
            levels: dict[str, Tensor] = self.fpn({str(i): m for i, m in enumerate(maps)})
        return {name: level.float() for name, level in levels.items()}


class Anchors(AnchorGenerator):  # type: ignore[misc]
    """torchvision's anchors, not rounded, and at the true strides of the levels (torchvision guesses them).

    Args:
        strides: Of every level.
        scales: Sizes of the anchors in strides.
        ratios: Height / width of the anchors.
        offset: Where in its cell an anchor lies: 0 for the corner, 0.5 for the center.
    """

    def __init__(
        self, strides: list[int], scales: list[float], ratios: tuple[float, ...], offset: float = 0.0
    ) -> None:
        super().__init__(
            tuple(tuple(s * scale for scale in scales) for s in strides), (ratios,) * len(strides)
        )
        self.strides, self.offset = strides, offset

    def generate_anchors(self, scales: tuple[float, ...], aspect_ratios: tuple[float, ...]) -> Tensor:
        """The anchors of a cell around its corner, ratio by ratio: (ratios · scales, 4)."""
        size, ratio = torch.tensor(scales)[None], torch.tensor(aspect_ratios)[:, None]
        w, h = (size / ratio.sqrt()).flatten(), (size * ratio.sqrt()).flatten()
        return torch.stack((-w, -h, w, h), 1) / 2

    def forward(self, images: Any, maps: list[Tensor]) -> list[Tensor]:
        """The anchors of each image, all levels in one: (n, 4)."""
        self.set_cell_anchors(maps[0].dtype, maps[0].device)
        levels = self.grid_anchors([m.shape[-2:] for m in maps], [(s, s) for s in self.strides])
        moved = [level + s * self.offset for level, s in zip(levels, self.strides, strict=True)]
        return [torch.cat(moved)] * len(images.image_sizes)


class _GroupNorm(nn.GroupNorm):
    """Takes the 1×1 map of a single small image too, which torch's own class refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class Padding(Transform):  # type: ignore[misc]
    """Normalizes images (3, h, w) in [0, 1], which have their size already, and pads them to one of all.

    What is found stays in their pixels.
    """

    def __init__(self, divisible: int) -> None:
        super().__init__(0, 0, _MEAN, _STD, size_divisible=divisible)

    def resize(self, image: Tensor, target: Target | None = None) -> tuple[Tensor, Target | None]:
        return image, target

    def postprocess(self, result: list[dict[str, Tensor]], *_: object) -> list[dict[str, Tensor]]:
        return result


def build_detector(name: DetectorName, encoder: nn.Module, classes: int, head: HeadConfig) -> nn.Module:
    """A detector as torchvision has them: images and targets to losses in training, else images to detections.

    Images (3, h, w) in [0, 1] have their size already, and detections are in their pixels: boxes, labels from 0,
    scores, and masks as squares of probabilities (n, 28, 28), to be pasted into the boxes.
    """
    body = maps_of(encoder)
    if head.fpn_channels % 32 and name not in TWO_STAGE and head.tower_norm == "group":
        raise SettingError(
            "head.fpn_channels",
            f"must be a multiple of 32 for {name} with group norm, not {head.fpn_channels}.",
        )
    model: nn.Module
    if name in TWO_STAGE:
        model = _rcnn(name, body, classes, head)
    else:
        model = _retinanet(body, classes, head) if name == "retinanet" else _fcos(body, classes, head)
    return model


def _rcnn(name: DetectorName, body: Maps, classes: int, head: HeadConfig) -> Any:
    pyramid = Pyramid(body, 4, head.fpn_channels, "subsampled")
    cascade = name == "cascade_rcnn"
    return _detection.generalized_rcnn.GeneralizedRCNN(
        pyramid,
        Proposals(
            Anchors(pyramid.strides, [8], _RATIOS),
            head.fpn_channels,
            train=head.proposals * (2 if cascade else 1),
            test=head.proposals,
        ),
        Heads(
            pyramid.strides[:4],
            classes,
            head,
            CASCADE if cascade else SINGLE,
            masks=name in WITH_MASKS,
        ),
        Padding(body.strides[-1]),
    )


def _retinanet(body: Maps, classes: int, head: HeadConfig) -> Any:
    pyramid = Pyramid(body, 3, head.fpn_channels, "map")
    anchors = Anchors(pyramid.strides, [4 * 2 ** (i / 3) for i in range(3)], _RATIOS)
    towers = RetinaNetTowers(
        head.fpn_channels, anchors.num_anchors_per_location()[0], classes, _tower_norm(head)
    )
    model: Any = _detection.RetinaNet(
        pyramid,
        classes,
        head=towers,
        anchor_generator=anchors,
        score_thresh=head.score_threshold,
        detections_per_img=head.detections,
    )
    model.transform = Padding(body.strides[-1])
    return model


def _fcos(body: Maps, classes: int, head: HeadConfig) -> Any:
    pyramid = Pyramid(body, 3, head.fpn_channels, "level")
    model: Any = _detection.FCOS(
        pyramid,
        classes,
        head=FCOSTowers(head.fpn_channels, classes, _tower_norm(head)),
        anchor_generator=Anchors(pyramid.strides, [1], (1.0,), offset=0.5),  # the points of FCOS
        score_thresh=head.score_threshold,
        detections_per_img=head.detections,
    )
    model.transform = Padding(body.strides[-1])
    return model


def _tower_norm(head: HeadConfig) -> NormLayer:
    return partial(_GroupNorm, 32) if head.tower_norm == "group" else None
