"""Thumbnails: the right picture in the right place."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from momentum2.config import DataConfig
from momentum2.data import open_dataset
from momentum2.report.sprites import COLUMNS, draw_sprites


def color_of(index: int) -> tuple[int, int, int]:
    return (index * 37 % 256, index * 91 % 256, index * 151 % 256)


def test_each_thumbnail_is_at_its_place(tmp_path: Path):
    per_sprite = COLUMNS * COLUMNS
    for i in range(per_sprite + 3):
        picture = Image.new("RGB", (150, 100) if i % 2 else (20, 30), color_of(i))
        picture.paste("black", (0, 0, 5, 100)) if i % 2 else None  # the edge, which the center does not show
        picture.save(tmp_path / f"{i:04d}.png")
    dataset = open_dataset(DataConfig("folder", str(tmp_path), cache="off"))
    order = list(reversed(range(len(dataset))))
    sprites = draw_sprites(dataset, order, image_size=32)
    assert sprites.side == 32
    assert len(sprites.pictures) == 2
    pixels = [np.asarray(Image.open(io.BytesIO(p)).convert("RGB"), float) for p in sprites.pictures]
    assert [p.shape for p in pixels] == [(16 * 32, 16 * 32, 3), (32, 16 * 32, 3)]
    for place, index in enumerate(order):
        sheet, rest = divmod(place, per_sprite)
        y, x = rest // COLUMNS * 32, rest % COLUMNS * 32
        tile = pixels[sheet][y + 4 : y + 28, x + 4 : x + 28]
        assert np.abs(tile.mean((0, 1)) - color_of(index)).max() < 12, index


def test_drawn_images_too():
    dataset = open_dataset(DataConfig("shapes", image_size=16))
    (picture,) = draw_sprites(dataset, [5, 3], image_size=16).pictures
    tile = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), float)[:16, 16:32]
    original = np.asarray(dataset.read([3])[0], float)
    assert np.abs(tile.mean((0, 1)) - original.mean((0, 1))).max() < 8
