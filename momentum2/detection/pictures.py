"""Pictures of what a detector found."""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from momentum2.detection.targets import Detections

_COLORS = (
    *((230, 60, 60), (50, 130, 230), (60, 170, 75), (245, 150, 30)),
    *((145, 60, 190), (20, 170, 170), (240, 90, 190)),
    *((130, 90, 40), (90, 100, 120), (120, 150, 0)),
)
_SMALLEST = 320  # pixels: smaller images are enlarged, so that the words can be read
_GAP = 8


def draw(image: Tensor, found: Detections, class_names: Sequence[str], threshold: float = 0.3) -> Image.Image:
    """The image uint8 (3, h, w) with box, mask, class and score of each detection above the threshold."""
    factor = max(1, -(-_SMALLEST // min(image.shape[1:])))
    pixels = image.cpu().permute(1, 2, 0).numpy().repeat(factor, 0).repeat(factor, 1)
    shown = (found["scores"] >= threshold).nonzero()[:, 0].tolist()
    if "masks" in found and shown:
        masks = (
            F.interpolate(found["masks"][None, shown].float().cpu(), scale_factor=factor)[0].bool().numpy()
        )
        for mask, color in zip(masks, _colors(found, shown), strict=True):
            pixels[mask] = (pixels[mask] * 0.55 + np.array(color) * 0.45).astype(np.uint8)
    picture = Image.fromarray(pixels)
    pen = ImageDraw.Draw(picture)
    # The best is drawn last, so that no other covers its words.
    for i, color in reversed(list(zip(shown, _colors(found, shown), strict=True))):
        x1, y1, x2, y2 = (found["boxes"][i] * factor).tolist()
        # The box of a detector that has learned little may be narrower than a pixel.
        pen.rectangle((x1, y1, max(x1, x2 - 1), max(y1, y2 - 1)), outline=color, width=2)
        text = f"{class_names[int(found['labels'][i])]} {float(found['scores'][i]):.2f}"
        # Above the box, but inside the picture.
        place = (max(min(x1, picture.width - pen.textlength(text) - 4), 0) + 2, max(y1 - 12, 0))
        left, top, right, bottom = pen.textbbox(place, text)
        pen.rectangle((left - 2, top - 1, right + 2, bottom + 1), fill=color)
        pen.text(place, text, fill="white")
    return picture


def grid(pictures: Sequence[Image.Image], columns: int = 4) -> Image.Image:
    """Pictures side by side, in rows."""
    columns = min(columns, len(pictures))
    width, height = (max(sizes) + _GAP for sizes in zip(*(p.size for p in pictures), strict=True))
    sheet = Image.new("RGB", (columns * width + _GAP, -(-len(pictures) // columns) * height + _GAP), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % columns * width + _GAP, i // columns * height + _GAP))
    return sheet


def _colors(found: Detections, shown: list[int]) -> list[tuple[int, int, int]]:
    return [_COLORS[int(found["labels"][i]) % len(_COLORS)] for i in shown]
