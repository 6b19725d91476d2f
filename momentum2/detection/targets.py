"""What an image shows: boxes, classes and masks, and the run-length codes in which COCO keeps masks."""

from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from faster_coco_eval.core import mask as codec
from numpy.typing import NDArray
from torch import Tensor

#: COCO's ways to write a mask: a list of polygons, a list of counts or compressed counts.
Segmentation = list[list[float]] | dict[str, Any]


class Target(TypedDict):
    """The n objects of one image, in its pixels."""

    boxes: Tensor  # float32 (n, 4): x1, y1, x2, y2
    labels: Tensor  # int64 (n,)
    #: bool (n, h, w), of the image as it was annotated, whatever size it has been given
    masks: NotRequired[Tensor]
    draw: NotRequired[int]  # in training: the seed of what is drawn for this image


class Detections(Target):
    """What a detector found in one image, best first."""

    scores: Tensor  # float32 (n,)


def to_rle(segmentation: Segmentation, height: int, width: int) -> dict[str, Any]:
    """Any of COCO's forms of a mask as compressed run-length code; the parts of an object become one."""
    if isinstance(segmentation, list):
        merged: dict[str, Any] = codec.merge(codec.frPyObjects(segmentation, height, width))
        return merged
    if isinstance(segmentation["counts"], list):
        compressed: dict[str, Any] = codec.frPyObjects(segmentation, height, width)
        return compressed
    return segmentation


def decode_masks(segmentations: list[Segmentation], height: int, width: int) -> Tensor:
    """Masks bool (n, h, w) from COCO's `segmentation` entries."""
    if not segmentations:
        return torch.zeros(0, height, width, dtype=torch.bool)
    masks = codec.decode([to_rle(s, height, width) for s in segmentations])  # (h, w, n)
    return torch.from_numpy(np.ascontiguousarray(masks.transpose(2, 0, 1))).bool()


def encode_masks(masks: Tensor | NDArray[np.bool_]) -> list[dict[str, Any]]:
    """Compressed run-length codes of masks (n, h, w), with text counts as JSON wants them."""
    if not len(masks):
        return []
    codes = codec.encode(np.asfortranarray(np.asarray(masks, dtype=np.uint8).transpose(1, 2, 0)))
    return [{"size": list(code["size"]), "counts": _text(code["counts"])} for code in codes]


def _text(counts: bytes | str) -> str:
    return counts.decode() if isinstance(counts, bytes) else counts
