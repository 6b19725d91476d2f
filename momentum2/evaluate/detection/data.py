"""Images with boxes and masks: COCO and LVIS files, and the drawn `shapes`."""

import json
import logging
from collections import Counter, defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from momentum2.data import shapes
from momentum2.data.images import BadImage, Encoded
from momentum2.data.sampler import seeded_subset
from momentum2.errors import UserError
from momentum2.evaluate.detection.config import DetectionDataConfig
from momentum2.evaluate.detection.targets import Target, decode_masks, encode_masks

log = logging.getLogger("momentum2")

_SHAPES_IMAGES = {"train": 4000, "test": 400}  # as many as wanted could be drawn


class DetectionData(Protocol):
    """n images; image i is a pure function of i."""

    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]  # of label 0, 1, ...
    image_ids: tuple[int, ...]

    def image(self, i: int) -> Tensor:
        """RGB uint8 (3, h, w)."""

    def target(self, i: int, masks: bool) -> Target:
        """The objects to learn; labels count from 0."""

    def ground_truth(self) -> dict[str, Any]:
        """All annotations of these images in COCO's format."""


class CocoData:
    """The images of one annotation file in COCO's format; LVIS 0.5 and 1.0 are written in it too.

    Args:
        annotations: The JSON file.
        images: Folder with the images; an LVIS file says itself in which of COCO's folders beside it each one is.
        count: Use only so many images of a seeded order.
        seed: Seed of that order.
        trainable: Leave out images without an object to learn.
    """

    def __init__(
        self, annotations: Path, images: Path, count: int | None = None, seed: int = 0, trainable: bool = False
    ) -> None:
        self.source, self.folder = annotations, images
        content = _load(annotations)
        categories = sorted(content["categories"], key=lambda c: int(c["id"]))
        self.class_names = tuple(str(c["name"]) for c in categories)
        self.category_ids = tuple(int(c["id"]) for c in categories)
        self._categories = content["categories"]
        self._label = {category: label for label, category in enumerate(self.category_ids)}
        entries = sorted(content["images"], key=lambda entry: int(entry["id"]))
        if count is not None and count < len(entries):
            entries = [entries[i] for i in seeded_subset(len(entries), seed, count)]
        self._all = _by_image(content["annotations"], {int(e["id"]) for e in content["images"]}, annotations)
        self._objects = {int(e["id"]): self._usable(e) for e in entries}
        if trainable:
            learnable = [e for e in entries if self._objects[int(e["id"])]]
            self._tell(len(entries) - len(learnable), "image(s) without an object to learn")
            entries = learnable
        if not entries:
            raise UserError(f"{annotations} has no image to use; check that it is the right file.")
        self._entries = entries
        self.image_ids = tuple(int(e["id"]) for e in entries)
        self._check_files()

    def image(self, i: int) -> Tensor:
        path = self._path(self._entries[i])
        try:
            pixels = Encoded(path.read_bytes()).pixels()
        except (OSError, BadImage) as error:
            raise UserError(f"{path} cannot be read ({error}); restore it or take it out of {self.source}.") from None
        entry = self._entries[i]
        if pixels.shape[:2] != (entry["height"], entry["width"]):
            raise UserError(
                f"{path} has {pixels.shape[1]}×{pixels.shape[0]} pixels, but {self.source} says "
                f"{entry['width']}×{entry['height']}; its boxes would be wrong."
            )
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def target(self, i: int, masks: bool) -> Target:
        entry = self._entries[i]
        objects = self._objects[int(entry["id"])]
        if masks and not all(_has_mask(o) for o in objects):
            raise UserError(f"{self.source} has objects without a mask; choose --model retinanet or fcos.")
        boxes = torch.tensor([o["xyxy"] for o in objects], dtype=torch.float32).reshape(-1, 4)
        labels = torch.tensor([self._label[o["category_id"]] for o in objects], dtype=torch.int64)
        target = Target(boxes=boxes, labels=labels)
        if masks:
            target["masks"] = decode_masks(
                [o["segmentation"] for o in objects], entry["height"], entry["width"]
            )
        return target

    def ground_truth(self) -> dict[str, Any]:
        annotations = [a for image in self.image_ids for a in self._all[image]]
        return {"images": self._entries, "annotations": annotations, "categories": self._categories}

    def labels(self) -> list[frozenset[int]]:
        """The classes that each image shows."""
        return [frozenset(self._label[o["category_id"]] for o in self._objects[i]) for i in self.image_ids]

    def _usable(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        """Objects to learn from: no crowds, boxes inside the image and not empty."""
        found = []
        for annotation in self._all[int(entry["id"])]:
            if annotation["category_id"] not in self._label:
                raise UserError(f"{self.source} has an object of category {annotation['category_id']}, which it lacks.")
            x, y, w, h = annotation["bbox"]
            x1, x2 = np.clip([x, x + w], 0, entry["width"]).tolist()
            y1, y2 = np.clip([y, y + h], 0, entry["height"]).tolist()
            if annotation.get("iscrowd"):
                continue
            if x2 <= x1 or y2 <= y1:
                self._degenerate += 1
                continue
            found.append({**annotation, "xyxy": (x1, y1, x2, y2)})
        return found
