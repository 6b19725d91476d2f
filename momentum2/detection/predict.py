"""Running a detector over many images, on all processes together."""

import json

import torch

from momentum2 import distributed
from momentum2.detection.coco_eval import Detection
from momentum2.detection.data import DetectionData
from momentum2.detection.detector import Detector
from momentum2.detection.targets import Detections, encode_masks
from momentum2.evaluate.features import evaluating


def predict(detector: Detector, data: DetectionData, device: torch.device) -> list[Detection]:
    """Detections in all images of `data`, in COCO's format, on every process.

    Each process takes every world-th image, one at a time: what is found does not depend on their number.
    """
    own = []
    with evaluating(detector):
        for i in range(distributed.rank(), len(data.image_ids), distributed.world_size()):
            found = detector.detect(data.image(i).to(device).float() / 255)
            own += to_coco(found, data.image_ids[i], data.category_ids)
    return _gather(own, device)


def to_coco(found: Detections, image_id: int, category_ids: tuple[int, ...]) -> list[Detection]:
    """The detections of one image in COCO's format."""
    corners = found["boxes"].double().cpu()
    boxes = torch.cat((corners[:, :2], corners[:, 2:] - corners[:, :2]), 1).tolist()
    labels, scores = found["labels"].tolist(), found["scores"].tolist()
    result: list[Detection] = [
        {"image_id": image_id, "category_id": category_ids[label], "score": score, "bbox": box}
        for label, score, box in zip(labels, scores, boxes, strict=True)
    ]
    if "masks" in found:
        for detection, code in zip(result, encode_masks(found["masks"].cpu()), strict=True):
            detection["segmentation"] = code
    return result


def _gather(own: list[Detection], device: torch.device) -> list[Detection]:
    """Those of all processes; they travel as lines of JSON."""
    text = "".join(json.dumps(detection) + "\n" for detection in own).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8)
    everyone = bytes(distributed.gather(data.to(device), even=False).cpu().numpy())
    found = [json.loads(line) for line in everyone.splitlines()]
    # An order that all numbers of processes share.
    return sorted(found, key=lambda detection: int(detection["image_id"]))
