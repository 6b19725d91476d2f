"""A drawing of what the network sees: some images and, beside each, its views."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from momentum2.augment import Normalization, ViewSpec, render, view_specs
from momentum2.config import Config
from momentum2.data.images import MAX_PIXELS, Pixels, visible
from momentum2.data.loader import Loader
from momentum2.data.opening import open_dataset
from momentum2.errors import SettingError
from momentum2.files import whole_file

_TILE = 96  # smaller views are enlarged, pixel by pixel, to about this
_GAP = 4


def write_views(config: Config, out_path: Path, count: int = 8) -> None:
    """Write a contact sheet: the first `count` images of step 0, each a row of the original and its views."""
    dataset = open_dataset(replace(config.data, cache="off"), seed=config.train.seed)
    specs = view_specs(config.views, config.data.image_size, Normalization.of(config.data))
    count = max(1, min(count, len(dataset)))
    most = max(1, MAX_PIXELS // ((1 + len(specs)) * specs[0].size ** 2))
    if count > most:
        raise SettingError(
            "count", f"must be at most {most} with views of {specs[0].size:,} pixels, not {count}."
        )
    with Loader(dataset, specs, seed=config.train.seed, batch_size=count, stop=1) as batches:
        batch = next(iter(batches))
    views = [
        _to_pixels(view, spec)
        for view, spec in zip(render(batch.images, batch.draws, specs), specs, strict=True)
    ]
    originals = dataset.read(batch.indices.tolist())
    rows = [
        (_square(visible(original), specs[0].size), *(visible(view[i]) for view in views))
        for i, original in enumerate(originals)
    ]
    try:
        write_picture(Image.fromarray(_sheet(rows)), out_path)
    except (OSError, ValueError) as error:
        raise SettingError(
            "out", f"{out_path} cannot be written ({error}). Choose a .png in a folder that exists."
        ) from error


def write_picture(picture: Image.Image, path: Path) -> None:
    """Write a picture whole or not at all; a `ValueError` if its suffix names no format."""
    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind is None:
        raise ValueError(f"unknown file extension: {path.suffix}")
    with whole_file(path) as file:
        picture.save(file, kind)


def _to_pixels(view: Tensor, spec: ViewSpec) -> Pixels:
    """(n, C, size, size) normalized to (n, size, size, C) uint8."""
    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (spec.mean, spec.std))
    pixels: Pixels = ((view * std + mean) * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return pixels


def _square(image: Pixels, side: int) -> Pixels:
    """The whole image in a white square."""
    scale = side / max(image.shape[:2])
    height, width = (max(1, round(length * scale)) for length in image.shape[:2])
    square = np.full((side, side, 3), 255, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    resized = np.asarray(Image.fromarray(image).resize((width, height)))
    square[top : top + height, left : left + width] = resized
    return square


def _sheet(rows: list[tuple[Pixels, ...]]) -> Pixels:
    """Tiles side by side on white; small views keep their relation to large ones."""
    zoom = -(-_TILE // rows[0][0].shape[0])
    side = rows[0][0].shape[0] * zoom + _GAP
    sheet = np.full((side * len(rows) + _GAP, side * len(rows[0]) + _GAP, 3), 255, np.uint8)
    for r, row in enumerate(rows):
        for c, tile in enumerate(row):
            enlarged = tile.repeat(zoom, 0).repeat(zoom, 1)
            height, width = enlarged.shape[:2]
            sheet[r * side + _GAP : r * side + _GAP + height, c * side + _GAP : c * side + _GAP + width] = (
                enlarged
            )
    return sheet
