"""Average precision as COCO and LVIS define it, computed by faster-coco-eval."""

from collections import defaultdict
from typing import Any, Literal

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster
from numpy.typing import NDArray

Style = Literal["coco", "lvis"]
Kind = Literal["bbox", "segm"]
#: image_id, category_id, score, bbox (x, y, w, h) and perhaps segmentation, as in COCO.
Detection = dict[str, Any]

_LVIS_DETECTIONS = 300  # per image
_AREAS = {"APs": "small", "APm": "medium", "APl": "large"}
_FREQUENCIES = {"APr": "r", "APc": "c", "APf": "f"}

#: IoU thresholds × recall thresholds × classes; -1 where a class has no object.
Precision = NDArray[np.float64]


def evaluate(
    ground_truth: dict[str, Any], detections: list[Detection], kind: Kind, style: Style = "coco"
) -> dict[str, Any]:
    """AP, AP50, AP75, APs, APm and APl in [0, 1], `per_class` AP, and APr, APc and APf for LVIS.

    A number is None where there is no object to find. LVIS judges a detection only in images for which its class
    has been checked, and at most 300 per image.

    Args:
        ground_truth: Images, annotations and categories in COCO's format.
        detections: In COCO's format.
        kind: Overlap of boxes ("bbox") or masks ("segm").
        style: Whose rules.
    """
    if style == "lvis":
        detections = _best_per_image(detections, _LVIS_DETECTIONS)
    evaluation = _run(ground_truth, detections, kind, style)
    params = evaluation.params
    precision = evaluation.eval["precision"][..., -1]  # the last entry of params.maxDets
    everything: Precision = precision[..., params.areaRngLbl.index("all")]
    values: dict[str, Any] = {"AP": _mean(everything)}
    for name, iou in (("AP50", 0.5), ("AP75", 0.75)):
        values[name] = _mean(everything[np.isclose(params.iouThrs, iou)])
    for name, area in _AREAS.items():
        values[name] = _mean(precision[..., params.areaRngLbl.index(area)])
    categories = {c["id"]: c for c in ground_truth["categories"]}
    if style == "lvis":
        frequency = np.array([categories[c]["frequency"] for c in params.catIds])
        for name, letter in _FREQUENCIES.items():
            values[name] = _mean(everything[..., frequency == letter])
    values["per_class"] = {
        categories[c]["name"]: _mean(everything[..., k]) for k, c in enumerate(params.catIds)
    }
    return values


def _run(ground_truth: dict[str, Any], detections: list[Detection], kind: Kind, style: Style) -> Any:
    """The evaluated `COCOeval`. It writes into the annotations it is given, so it is given copies."""
    truth = {
        "images": ground_truth["images"],
        "categories": ground_truth["categories"],
        "annotations": [_complete(a, i, kind) for i, a in enumerate(ground_truth["annotations"], 1)],
    }
    found = [{key: d[key] for key in _keys(kind)} for d in detections]
    coco = COCO(truth)
    evaluation = COCOeval_faster(coco, coco.loadRes(found), kind, lvis_style=style == "lvis")
    if style == "lvis":
        evaluation.params.maxDets = [_LVIS_DETECTIONS]
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation


def _keys(kind: Kind) -> tuple[str, ...]:
    # Without a box beside it, a mask's own area decides whether it is small, medium or large.
    return ("image_id", "category_id", "score", "bbox" if kind == "bbox" else "segmentation")


def _complete(annotation: dict[str, Any], number: int, kind: Kind) -> dict[str, Any]:
    """A copy with all that the evaluation reads; numbered from 1, since 0 means "unmatched" there."""
    x, y, width, height = annotation["bbox"]
    copy = {**annotation, "id": number, "iscrowd": int(bool(annotation.get("iscrowd")))}
    if copy.get("area") is None:
        copy["area"] = width * height
    if kind == "bbox":
        copy.pop("segmentation", None)  # which need not be one
    elif not copy.get("segmentation"):  # such as a crowd of which only the box is known
        copy["segmentation"] = [[x, y, x + width, y, x + width, y + height, x, y + height]]
    return copy


def _best_per_image(detections: list[Detection], count: int) -> list[Detection]:
    by_image = defaultdict(list)
    for detection in sorted(detections, key=lambda d: -d["score"]):
        by_image[detection["image_id"]].append(detection)
    return [d for found in by_image.values() for d in found[:count]]


def _mean(precision: Precision) -> float | None:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else None
