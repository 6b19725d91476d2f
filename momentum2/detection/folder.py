"""Running a fine-tuned detector on a folder of images."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from momentum2.data.contact_sheet import write_picture
from momentum2.data.images import MAX_BYTES, SUFFIXES, BadImage, Encoded
from momentum2.detection.detector import Detector
from momentum2.detection.pictures import draw
from momentum2.detection.predict import to_coco
from momentum2.detection.saved import DetectorCard
from momentum2.errors import SettingError, UserError
from momentum2.files import files_below, read, write_whole
from momentum2.runs.names import DETECTIONS

log = logging.getLogger("momentum2")


def detect_in_folder(
    detector: Detector, card: DetectorCard, folder: Path, out: Path, device: torch.device
) -> int:
    """Write `detections.json` and a picture of each image, `pictures/NAME.png`; returns the number of images.

    An image that cannot be read is named in a warning and left out.
    """
    if not folder.is_dir():
        raise SettingError("images", f"{folder} is not a folder.")
    files = list(files_below(folder, *SUFFIXES))
    if not files:
        raise SettingError("images", f"{folder} contains no images.")
    out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for path in files:
        try:
            pixels = Encoded(read(path, MAX_BYTES)).pixels()
        except (OSError, BadImage) as error:
            log.warning("Cannot read %s (%s). Skipping it.", path, error)
            continue
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        detections = detector.detect(image.to(device).float() / 255)
        objects = to_coco(detections, len(found), tuple(card.category_ids))
        for entry, label in zip(objects, detections["labels"].tolist(), strict=True):
            entry["class"] = card.class_names[label]
        name = path.relative_to(folder).as_posix()
        found.append({"file": name, "height": image.shape[1], "width": image.shape[2], "detections": objects})
        picture = out / "pictures" / f"{name}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        write_picture(draw(image, detections, card.class_names), picture)
    if not found:
        raise UserError(f"None of the {len(files)} images in {folder} can be read.")
    write_whole(out / DETECTIONS, (json.dumps(found, indent=1) + "\n").encode())
    return len(found)
