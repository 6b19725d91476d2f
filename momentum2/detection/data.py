"""The images to detect objects in: `shapes`, or files of COCO or LVIS."""

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from momentum2.data import shapes
from momentum2.detection.coco import CocoData
from momentum2.detection.presets import DetectionDataConfig, DetectionDataName
from momentum2.detection.targets import Target, encode_masks
from momentum2.errors import SettingError

_SHAPES_TRAIN, _SHAPES_TEST = 4000, 200  # images of shapes unless said otherwise; there are as many as wanted


class DetectionData(Protocol):
    """Images 0 to `len(image_ids) - 1`; each is a pure function of its number, read from any thread."""

    name: str  # for people
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]  # of labels 0, 1, ...
    image_ids: tuple[int, ...]

    def image(self, i: int) -> Tensor:
        """RGB uint8 (3, h, w)."""
        ...

    def target(self, i: int, masks: bool) -> Target:
        """The objects to learn, labels from 0, with their masks if asked for."""
        ...

    def classes(self, i: int) -> frozenset[int]:
        """The labels that image i shows."""
        ...

    def aspect(self, i: int) -> float:
        """Width / height of image i, known without reading it."""
        ...

    def ground_truth(self) -> dict[str, Any]:
        """All that is known about these images, in COCO's format."""
        ...


class ShapesData:
    """Scenes of `shapes` of size × size pixels."""

    class_names = shapes.CLASS_NAMES
    category_ids = tuple(range(1, len(shapes.CLASS_NAMES) + 1))

    def __init__(self, split: str, size: int, count: int) -> None:
        self.name, self.split, self.size = f"shapes {split}", split, size
        self.image_ids = tuple(range(count))

    def image(self, i: int) -> Tensor:
        pixels = shapes.render_scene(np.array([i]), self.size, split=self.split)[0]
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    def target(self, i: int, masks: bool) -> Target:
        found = self._annotation(i)
        target = Target(boxes=torch.from_numpy(found["boxes"]), labels=torch.from_numpy(found["labels"]))
        if masks:
            target["masks"] = torch.from_numpy(found["masks"])
        return target

    def classes(self, i: int) -> frozenset[int]:
        return frozenset(self._annotation(i)["labels"].tolist())

    def aspect(self, i: int) -> float:
        return 1.0

    def ground_truth(self) -> dict[str, Any]:
        images = [{"id": i, "height": self.size, "width": self.size} for i in self.image_ids]
        categories = [
            {"id": c, "name": name} for c, name in zip(self.category_ids, self.class_names, strict=True)
        ]
        return {"images": images, "annotations": self._annotations, "categories": categories}

    @cached_property
    def _annotations(self) -> list[dict[str, Any]]:
        return [entry for i in self.image_ids for entry in self._entries(i)]

    def _entries(self, i: int) -> list[dict[str, Any]]:
        found = self._annotation(i)
        sizes = np.concatenate((found["boxes"][:, :2], found["boxes"][:, 2:] - found["boxes"][:, :2]), 1)
        return [
            {
                "image_id": i,
                "category_id": self.category_ids[label],
                "bbox": box,
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": code,
            }
            for label, box, mask, code in zip(
                found["labels"], sizes.tolist(), found["masks"], encode_masks(found["masks"]), strict=True
            )
        ]

    def _annotation(self, i: int) -> shapes.Annotation:
        return shapes.annotations(np.array([i]), self.size, split=self.split)[0]


def kind_in(root: str) -> DetectionDataName:
    """Which files are in a folder: coco or lvis."""
    found = sorted(file.name for file in Path(root, "annotations").glob("*.json"))
    if any(name.startswith("instances_") for name in found):
        return "coco"
    if any(name.startswith("lvis_") for name in found):
        return "lvis"
    raise SettingError(
        "data.root",
        f"{root} has no annotations/instances_SPLIT.json (COCO) or annotations/lvis_SPLIT.json (LVIS).",
    )


def open_data(config: DetectionDataConfig, training: bool, seed: int, masks: bool = False) -> DetectionData:
    """The images to train on, or those to evaluate on; with `masks`, every object must have one."""
    split, count = (config.split, config.train_size) if training else (config.test_split, config.test_size)
    if config.name == "shapes":
        if config.root is not None:
            raise SettingError(
                "data.root", "is only for files, and shapes are drawn. Set data.name to coco or lvis."
            )
        return ShapesData(
            split,
            config.scene_size or config.test_short_edge,
            count or (_SHAPES_TRAIN if training else _SHAPES_TEST),
        )
    if config.root is None:
        raise SettingError(
            "data.root", f"is required for {config.name}: the folder that contains annotations/."
        )
    root = Path(config.root)
    if not root.is_dir():
        raise SettingError("data.root", f"{root} is not a folder.")
    prefix, folder = ("instances", split) if config.name == "coco" else ("lvis", _coco_folder(split))
    data = CocoData(
        root / "annotations" / f"{prefix}_{split}.json", root / folder, count, seed, training, masks
    )
    known = all(c.get("frequency") in ("r", "c", "f") for c in data.ground_truth()["categories"])
    if config.name == "lvis" and not known:
        raise SettingError(
            "data.name",
            f"cannot be lvis, because {data.source} does not say how frequent its classes are. Use coco.",
        )
    return data


def _coco_folder(split: str) -> str:
    """Where LVIS 0.5 has the images of a split such as v0.5_train; LVIS 1.0 says it for each image."""
    return "train2017" if split.endswith("train") else "val2017"
