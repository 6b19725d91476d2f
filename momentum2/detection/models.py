"""The four detectors, put together from torchvision's parts on a feature pyramid of our encoder."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from momentum2._torchvision import torchvision
from momentum2.detection.cascade import CascadeRoIHeads
from momentum2.detection.maps import Maps, maps_of
from momentum2.detection.presets import TWO_STAGE, DetectorName, HeadConfig
from momentum2.errors import SettingError, UserError
from momentum2.norms import SyncedBatchNorm, convert_norms

_detection = torchvision.models.detection
_pyramid = torchvision.ops.feature_pyramid_network
_poolers = torchvision.ops.poolers
AnchorGenerator: Any = _detection.anchor_utils.AnchorGenerator

_RATIOS = (0.5, 1.0, 2.0)  # height / width of the anchors


class Pyramid(nn.Module):
    """The maps of an encoder and the feature pyramid on them; all batch norms are synced and trained.

    Args:
        body: The encoder's maps.
        count: How many of them to build on, the coarsest ones.
        channels: Channels of every level.
        dense: Two more levels computed from the last map (P6, P7), not one subsampled from the last level (P6).

    Attributes:
        out_channels: Channels of every level (the name that torchvision asks for).
        strides: Pixels of the image per cell, of every level.
        bf16: Compute in bf16; the levels come out in fp32 all the same.
    """

    bf16 = False

    def __init__(self, body: Maps, count: int, channels: int, dense: bool) -> None:
        super().__init__()
        self.body, self.count = body, count
        convert_norms(self.body, "synced")
        widths = list(body.channels[-count:])
        top = _pyramid.LastLevelP6P7(widths[-1], channels) if dense else _pyramid.LastLevelMaxPool()
        self.fpn = _pyramid.FeaturePyramidNetwork(widths, channels, top, norm_layer=SyncedBatchNorm)
        self.out_channels = channels
        self.strides = list(body.strides[-count:])
        self.strides += [self.strides[-1] * 2**i for i in ((1, 2) if dense else (1,))]

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Levels of n × out_channels × h/stride × w/stride, finest first."""
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16):
            maps = self.body(images)[-self.count :]
            levels: dict[str, Tensor] = self.fpn({str(i): m for i, m in enumerate(maps)})
        return {name: level.float() for name, level in levels.items()}


class Anchors(AnchorGenerator):  # type: ignore[misc]
    """torchvision's anchors at the true strides of the levels (torchvision guesses them from the padded size).

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
            tuple(tuple(int(s * scale) for scale in scales) for s in strides), (ratios,) * len(strides)
        )
        self.strides, self.offset = strides, offset

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


def build_detector(
    name: DetectorName,
    encoder: nn.Module,
    classes: int,
    head: HeadConfig,
    short_edge: int,
    max_long_edge: int,
) -> nn.Module:
    """torchvision's module of that detector: images and targets to losses in training, else images to detections.

    Images (3, h, w) in [0, 1] are normalized and padded; in evaluation they are also scaled to `short_edge`, or less
    where the other edge would be longer than `max_long_edge`. In training they already have their size.
    """
    body = maps_of(encoder)
    two_stage = name in TWO_STAGE
    if head.fpn_channels % 32 and not two_stage and head.tower_norm == "group":
        raise SettingError(
            "head.fpn_channels",
            f"must be a multiple of 32 for {name} with group norm, not {head.fpn_channels}.",
        )
    count = 4 if two_stage else 3
    if len(body.strides) < count:
        raise UserError(
            f"{name} needs {count} maps, but the backbone has {len(body.strides)}. Choose retinanet."
        )
    pyramid = Pyramid(body, count, head.fpn_channels, dense=not two_stage)
    sizes = {
        "min_size": short_edge,
        "max_size": max_long_edge,
        "size_divisible": pyramid.strides[count - 1],
        "_skip_resize": True,  # in training
    }
    model: nn.Module = _BUILD[name](pyramid, classes, head, sizes)
    return model


def _mask_rcnn(pyramid: Pyramid, classes: int, head: HeadConfig, sizes: dict[str, Any]) -> Any:
    channels, outputs = head.fpn_channels, classes + 1
    model: Any = _detection.MaskRCNN(
        pyramid,
        **sizes,
        rpn_anchor_generator=Anchors(pyramid.strides, [8], _RATIOS),
        rpn_pre_nms_top_n_train=2 * head.proposals,
        rpn_pre_nms_top_n_test=head.proposals,
        rpn_post_nms_top_n_train=head.proposals,
        rpn_post_nms_top_n_test=head.proposals,
        box_roi_pool=_pool(pyramid, 7),
        box_head=_detection.faster_rcnn.TwoMLPHead(channels * 7**2, head.box_width),
        box_predictor=_detection.faster_rcnn.FastRCNNPredictor(head.box_width, outputs),
        box_batch_size_per_image=head.sampled,
        box_score_thresh=head.score_threshold,
        box_detections_per_img=head.detections,
        mask_roi_pool=_pool(pyramid, 14),
        mask_head=_detection.mask_rcnn.MaskRCNNHeads(channels, (channels,) * 4, dilation=1),
        mask_predictor=_detection.mask_rcnn.MaskRCNNPredictor(channels, channels, outputs),
    )
    return model


def _cascade_rcnn(pyramid: Pyramid, classes: int, head: HeadConfig, sizes: dict[str, Any]) -> Any:
    model = _mask_rcnn(pyramid, classes, head, sizes)
    model.roi_heads = CascadeRoIHeads(model.roi_heads, head.box_width, classes + 1)
    return model


def _retinanet(pyramid: Pyramid, classes: int, head: HeadConfig, sizes: dict[str, Any]) -> Any:
    channels, norm = head.fpn_channels, _tower_norm(head)
    anchors = Anchors(pyramid.strides, [4 * 2 ** (i / 3) for i in range(3)], _RATIOS)
    towers = _detection.retinanet.RetinaNetHead(
        channels, anchors.num_anchors_per_location()[0], classes, norm_layer=norm
    )
    for layer in (*towers.classification_head.conv.modules(), *towers.regression_head.conv.modules()):
        if isinstance(layer, nn.Conv2d):  # torchvision's 0.01 is for 256 channels; keep its gain with fewer
            nn.init.normal_(layer.weight, std=0.01 * (256 / channels) ** 0.5)
    model: Any = _detection.RetinaNet(
        pyramid,
        classes,
        **sizes,
        head=towers,
        anchor_generator=anchors,
        score_thresh=head.score_threshold,
        detections_per_img=head.detections,
    )
    return model


def _fcos(pyramid: Pyramid, classes: int, head: HeadConfig, sizes: dict[str, Any]) -> Any:
    fcos, channels, norm = _detection.fcos, head.fpn_channels, _tower_norm(head)
    towers = fcos.FCOSHead(channels, 1, classes)
    towers.classification_head = fcos.FCOSClassificationHead(channels, 1, classes, norm_layer=norm)
    towers.regression_head = fcos.FCOSRegressionHead(channels, 1, norm_layer=norm)
    model: Any = _detection.FCOS(
        pyramid,
        classes,
        **sizes,
        head=towers,
        anchor_generator=Anchors(pyramid.strides, [1], (1.0,), offset=0.5),  # the points of FCOS
        score_thresh=head.score_threshold,
        detections_per_img=head.detections,
    )
    return model


def _tower_norm(head: HeadConfig) -> Callable[[int], nn.Module] | None:
    return partial(_GroupNorm, 32) if head.tower_norm == "group" else None


_BUILD: dict[DetectorName, Callable[[Pyramid, int, HeadConfig, dict[str, Any]], Any]] = {
    "mask_rcnn": _mask_rcnn,
    "cascade_rcnn": _cascade_rcnn,
    "retinanet": _retinanet,
    "fcos": _fcos,
}


def _pool(pyramid: Pyramid, size: int) -> Any:
    """RoIAlign on the levels of the ResNet's stages, each box on the level of its size."""
    names = [str(i) for i in range(len(pyramid.fpn.inner_blocks))]
    pool: Any = torchvision.ops.MultiScaleRoIAlign(names, size, sampling_ratio=2)
    # Left alone, it would guess the scales from the first batch it sees, which a resumed run does not see.
    strides = pyramid.strides[: len(names)]
    pool.scales = [1 / stride for stride in strides]
    pool.map_levels = _poolers.initLevelMapper(strides[0].bit_length() - 1, strides[-1].bit_length() - 1)
    return pool
