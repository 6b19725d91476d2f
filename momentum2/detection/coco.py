"""Annotation files in COCO's format, in which LVIS 0.5 and 1.0 are written too."""

import logging
from collections import Counter, defaultdict
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from momentum2.data.images import MAX_BYTES, BadImage, Encoded
from momentum2.data.sampler import seeded_subset
from momentum2.detection.targets import Segmentation, Target, decode_masks
from momentum2.errors import SettingError, UserError
from momentum2.files import read, read_json
from momentum2.terminal import progress

log = logging.getLogger("momentum2")

Entry = dict[str, Any]  # an object of the JSON file
_LARGEST = 4 << 30  # bytes of an annotation file; LVIS has 1.1 GB
_THINNEST = 0.01  # pixels: a box with less may lose its area when it is scaled in fp32
_FARTHEST = 1e5  # pixels: no image is that large, and outlines beyond take minutes or forever to fill


class CocoData:
    """The images of one annotation file.

    Args:
        annotations: The JSON file.
        images: Folder of the images. Where an entry has a `coco_url`, as in LVIS 1.0, its folder is the one named
            there, beside this one.
        count: Use only the first `count` images of a seeded order.
        seed: Seed of that order.
        training: Leave out images that show nothing to learn.
        masks: Refuse objects without a mask.
    """

    def __init__(
        self,
        annotations: Path,
        images: Path,
        count: int | None = None,
        seed: int = 0,
        training: bool = False,
        masks: bool = False,
    ) -> None:
        self.name, self.source, self.folder = str(annotations), annotations, images
        content = _load(annotations)
        self._categories = sorted(content["categories"], key=lambda entry: int(entry["id"]))
        self.class_names = tuple(str(c["name"]) for c in self._categories)
        self.category_ids = tuple(int(c["id"]) for c in self._categories)
        entries = sorted(content["images"], key=lambda entry: int(entry["id"]))
        if count is not None and count < len(entries):
            entries = [entries[i] for i in seeded_subset(len(entries), seed, count)]
        self._annotations = _by_image(content["annotations"])
        listed = {entry["id"] for entry in content["images"]}
        lost = sum(len(objects) for image, objects in self._annotations.items() if image not in listed)
        _tell(annotations, lost, "objects of images that it does not list")
        self._objects = _usable(entries, self._annotations, self.category_ids, annotations)
        if training:
            self._entries = [e for e in entries if self._objects[e["id"]]]
            _tell(annotations, len(entries) - len(self._entries), "images that show nothing to learn")
        else:
            self._entries = entries
        if not self._entries:
            raise UserError(f"{annotations} has no image with an object. Check that it is the right file.")
        self.image_ids = tuple(int(e["id"]) for e in self._entries)
        self._paths = [_path(images, e) for e in self._entries]
        _refuse_missing(self._paths, annotations)
        if masks:
            self._check_masks()

    def image(self, i: int) -> Tensor:
        """RGB uint8 (3, h, w)."""
        path, entry = self._paths[i], self._entries[i]
        try:
            pixels = Encoded(read(path, MAX_BYTES)).pixels()
        except (OSError, BadImage) as error:
            raise UserError(
                f"{path} cannot be read ({error}). Restore it, or remove it from {self.source}."
            ) from None
        if pixels.shape[:2] != (entry["height"], entry["width"]):
            raise UserError(
                f"{path} is {pixels.shape[1]}×{pixels.shape[0]} pixels, not {entry['width']}×{entry['height']} as "
                f"{self.source} says, so its boxes would be wrong. Restore it, or remove its entry."
            )
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def target(self, i: int, masks: bool) -> Target:
        """The objects to learn: no crowds, boxes clipped to the image and not empty."""
        entry = self._entries[i]
        objects = self._objects[entry["id"]]
        boxes = torch.tensor([o["box"] for o in objects], dtype=torch.float32).reshape(-1, 4)
        target = Target(boxes=boxes, labels=torch.tensor([o["label"] for o in objects], dtype=torch.int64))
        if masks:
            target["masks"] = decode_masks(
                [o["segmentation"] for o in objects], entry["height"], entry["width"]
            )
        return target

    def _check_masks(self) -> None:
        """Every object has a mask that can be decoded, crowds among them: they are needed in evaluation."""
        coded = []
        for path, entry in zip(self._paths, self._entries, strict=True):
            if not all(o["segmentation"] for o in self._objects[entry["id"]]):
                raise SettingError(
                    "model",
                    f"needs masks, but {self.source} has objects without one, such as in {path.name}. "
                    "Choose faster_rcnn, retinanet or fcos.",
                )
            codes = [a["segmentation"] for a in self._annotations[entry["id"]] if _is_code(a)]
            if codes:
                coded.append((entry, codes))
        with progress("Checking masks", len(coded), "images") as advance:
            for entry, codes in coded:
                try:
                    decode_masks(codes, entry["height"], entry["width"])
                except (RuntimeError, ValueError, TypeError):
                    raise UserError(
                        f"{self.source} has a run-length code in image {entry['id']} that cannot be decoded. "
                        "Correct it, or remove its entry."
                    ) from None
                advance(1)

    def aspect(self, i: int) -> float:
        """Width / height of image i."""
        return float(self._entries[i]["width"] / self._entries[i]["height"])

    def classes(self, i: int) -> frozenset[int]:
        """The labels that image i shows."""
        return frozenset(o["label"] for o in self._objects[self._entries[i]["id"]])

    def ground_truth(self) -> dict[str, Any]:
        """All annotations of these images, crowds included, in COCO's format."""
        annotations = [a for entry in self._entries for a in self._annotations[entry["id"]]]
        return {"images": self._entries, "annotations": annotations, "categories": self._categories}


def _load(path: Path) -> dict[str, list[Entry]]:
    try:
        content = read_json(path, _LARGEST)
        for section, keys in _NEEDED.items():
            for entry in content[section]:
                if problem := _problem(section, keys, entry):
                    raise UserError(f"{path} is not in COCO's format: {problem}.")
            counts = Counter(entry["id"] for entry in content[section] if "id" in keys)
            if counts and max(counts.values()) > 1:
                twice = counts.most_common(1)[0][0]
                raise UserError(f"{path} is not in COCO's format: {section!r} has the id {twice} twice.")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}). Check data.root and data.split."
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        raise UserError(f"{path} is not an annotation file in COCO's format.") from None
    return content  # type: ignore[no-any-return]


_NEEDED = {
    "images": {"id", "height", "width"},
    "annotations": {"image_id", "category_id", "bbox"},
    "categories": {"id", "name"},
}


_INTEGERS = {"id", "image_id", "category_id", "height", "width"}


def _problem(section: str, keys: set[str], entry: Entry) -> str | None:
    if not keys <= entry.keys():
        return f"an entry of {section!r} lacks {min(keys - entry.keys())!r}"
    for key in keys & _INTEGERS:
        if not isinstance(entry[key], int):
            return f"{key!r} of an entry of {section!r} is {entry[key]!r}, not a whole number"
        if key in ("height", "width") and entry[key] < 1:
            return f"{key!r} of an entry of {section!r} is {entry[key]}"
    if "bbox" in keys and not _is_box(entry["bbox"]):
        return f"a 'bbox' is {entry['bbox']!r}, not x, y, w, h"
    if "bbox" in keys and not _is_mask(entry.get("segmentation")):
        return "a 'segmentation' is neither polygons nor a run-length code"
    if "bbox" in keys and entry.get("iscrowd") not in (None, 0, 1):
        return f"an 'iscrowd' is {entry['iscrowd']!r}, not 0 or 1"
    area = entry.get("area")
    if "bbox" in keys and not (area is None or (isinstance(area, int | float) and isfinite(area))):
        return f"an 'area' is {area!r}, not a number"
    return None


def _is_box(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 4
        and all(isinstance(v, int | float) and isfinite(v) for v in value)
    )


def _is_mask(value: object) -> bool:
    if isinstance(value, dict):
        return {"size", "counts"} <= value.keys()
    return value is None or (isinstance(value, list) and all(map(_is_polygon, value)))


def _is_polygon(value: object) -> bool:
    """Whether it is a list of numbers that can be in an image; there may be millions of them."""
    try:
        return isinstance(value, list) and (
            not value or (isfinite(sum(value)) and min(value) > -_FARTHEST and max(value) < _FARTHEST)
        )
    except TypeError:  # other things than numbers
        return False


def _is_code(annotation: Entry) -> bool:
    return isinstance(annotation.get("segmentation"), dict)


def _by_image(annotations: list[Entry]) -> dict[int, list[Entry]]:
    found = defaultdict(list)
    for annotation in annotations:
        found[annotation["image_id"]].append(annotation)
    return found


def _usable(
    entries: list[Entry], annotations: dict[int, list[Entry]], categories: tuple[int, ...], source: Path
) -> dict[int, list[Entry]]:
    """Per image the objects to learn: label from 0, box (x1, y1, x2, y2) inside the image, segmentation."""
    label_of = {category: label for label, category in enumerate(categories)}
    found: dict[int, list[Entry]] = {}
    empty = 0
    for entry in entries:
        objects = found[entry["id"]] = []
        for annotation in annotations.get(entry["id"], []):
            if annotation["category_id"] not in label_of:
                raise UserError(f"{source} uses category {annotation['category_id']} without listing it.")
            mask = _mask(annotation)
            if isinstance(mask, dict) and mask["size"] != [entry["height"], entry["width"]]:
                raise UserError(
                    f"{source} has a mask of {mask['size']} pixels in image {entry['id']}, which has "
                    f"[{entry['height']}, {entry['width']}]. Correct it, or remove its entry."
                )
            if annotation.get("iscrowd"):
                continue
            x, y, w, h = annotation["bbox"]
            box = (max(x, 0), max(y, 0), min(x + w, entry["width"]), min(y + h, entry["height"]))
            if min(box[2] - box[0], box[3] - box[1]) < _THINNEST or mask == []:
                empty += 1
                continue
            objects.append({"box": box, "label": label_of[annotation["category_id"]], "segmentation": mask})
    _tell(source, empty, "objects whose box or outline is empty")
    return found


def _mask(annotation: Entry) -> Segmentation | None:
    """The mask of an object; None where it has none, an empty list where no polygon has three corners."""
    given: Segmentation | None = annotation.get("segmentation") or None
    if not isinstance(given, list):
        return given
    return [polygon for polygon in given if len(polygon) >= 6 and len(polygon) % 2 == 0]


def _tell(source: Path, count: int, what: str) -> None:
    if count:
        log.warning("%s: ignoring %d %s.", source, count, what)


def _path(folder: Path, entry: Entry) -> Path:
    if "file_name" not in entry:  # LVIS 1.0: one file for images of several of COCO's folders
        return folder.parent.joinpath(*str(entry.get("coco_url", "")).split("/")[-2:])
    name = str(entry["file_name"])
    return folder / (name[-16:] if name.startswith("COCO_") else name)  # LVIS 0.5 uses COCO's names of 2014


def _refuse_missing(paths: list[Path], source: Path) -> None:
    present = {
        folder: {p.name for p in folder.iterdir()} if folder.is_dir() else set()
        for folder in {p.parent for p in paths}
    }
    missing = [p for p in paths if p.name not in present[p.parent]]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(paths)} images of {source} are missing, such as {missing[0]}. "
            "Check data.root, or restore them."
        )
