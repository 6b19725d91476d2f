"""Thumbnails of many images in few pictures, so that a page with thousands of them opens at once."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image, ImageOps

from momentum2.data import Dataset
from momentum2.data.images import Array, Picture, visible

#: Thumbnails in a row, and rows, of one sprite.
COLUMNS = 16
_FEW = 4000  # up to here thumbnails may be larger


@dataclass(frozen=True)
class Sprites:
    """WebP pictures of COLUMNS × COLUMNS thumbnails, row by row, each `side` pixels wide and high."""

    side: int
    pictures: list[bytes]


def draw_sprites(dataset: Dataset, indices: Sequence[int], image_size: int) -> Sprites:
    """The centers of the images, in this order."""
    side = min(image_size, 64 if len(indices) <= _FEW else 48)
    per_sprite = COLUMNS * COLUMNS
    blocks = (indices[i : i + per_sprite] for i in range(0, len(indices), per_sprite))
    return Sprites(side, [_draw(_thumbnails(dataset, block, side), len(block), side) for block in blocks])


def _draw(thumbnails: Iterator[Image.Image], count: int, side: int) -> bytes:
    sprite = Image.new("RGB", (side * COLUMNS, side * -(-count // COLUMNS)), "white")
    for i, thumbnail in enumerate(thumbnails):
        sprite.paste(thumbnail, (i % COLUMNS * side, i // COLUMNS * side))
    file = io.BytesIO()
    sprite.save(file, "WEBP", quality=75)
    return file.getvalue()


def _thumbnails(dataset: Dataset, indices: Sequence[int], side: int) -> Iterator[Image.Image]:
    def small(picture: Picture) -> Image.Image:
        reduce = next((r for r in (8, 4, 2) if min(picture.size) >= r * side), 1)
        return ImageOps.fit(Image.fromarray(visible(picture.pixels(reduce))), (side, side))

    if dataset.fixed_size is not None:  # then many at a time are quicker, and small
        return (small(Array(pixels)) for pixels in dataset.read(indices))
    return (dataset.good(i, small)[1] for i in indices)
