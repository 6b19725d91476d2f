"""`shapes`: a labeled data set that is drawn, not downloaded.

A class is a shape *and* a texture (striped disc, dotted cross, ...). The object has a random place, size,
angle and colors, over a background with colors, texture and clutter of its own, so neither color nor
background gives the class away. Every image is a pure function of (seed, split, index, size): any index may
be asked for, in any order and company, and gives the same bytes.

Arrays of pixels only meet exactly rounded operations (no sine, no matrix product), whose results do not
depend on the machine or on how many images are drawn together.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.integer[Any]]

SHAPES = ("disc", "cross")
TEXTURES = ("striped", "dotted", "checked", "waved", "plain")
CLASS_NAMES = tuple(f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES)

_CHUNK_PIXELS = 1 << 16  # drawn at a time: the working arrays stay in the cache
_RIM = 0.1  # width in radii of an object's outline, in the ground color of its texture
_BARS = 4  # pieces of clutter
_LATTICE = 4  # the background's colors are interpolated between this many points per side
_QUADRANTS = np.array([(x, y) for y in (0.27, 0.73) for x in (0.27, 0.73)], np.float32)

_TURN = 2 * np.pi * np.arange(4096) / 4096
_COS, _SIN = np.cos(_TURN).astype(np.float32), np.sin(_TURN).astype(np.float32)


class Annotation(TypedDict):
    """The k visible objects of one image, in painting order."""

    boxes: Floats  # (k, 4) x1, y1, x2, y2 in pixels; x2 and y2 lie after the last pixel
    labels: Ints  # (k,) indices of CLASS_NAMES
    masks: Bools  # (k, size, size) the visible part


def render(indices: Indices, size: int, seed: int = 0, split: str = "train") -> NDArray[np.uint8]:
    """Images of one large object each: RGB uint8 (n, size, size, 3)."""
    draws = _Draws(seed, split)
    chunks = [_paint(draws, rows, size, [_single(draws, rows)]) for rows in _chunks(indices, size)]
    return np.concatenate(chunks)


def labels(indices: Indices, seed: int = 0, split: str = "train") -> Ints:
    """Class of each image of `render`: int64 (n,). Indices 10i to 10i + 9 hold every class once."""
    return _Draws(seed, split).labels(np.asarray(indices))


def render_scene(indices: Indices, size: int, seed: int = 0, split: str = "train") -> NDArray[np.uint8]:
    """Images of one to four objects of varied size, for detection: RGB uint8 (n, size, size, 3)."""
    draws = _Draws(seed, split)
    return np.concatenate([_paint(draws, rows, size, _scene(draws, rows)) for rows in _chunks(indices, size)])


def annotations(indices: Indices, size: int, seed: int = 0, split: str = "train") -> list[Annotation]:
    """What each image of `render_scene` shows."""
    draws = _Draws(seed, split)
    found: list[Annotation] = []
    for rows in _chunks(indices, size):
        objects = _scene(draws, rows)
        masks = np.stack(
            [(_depth(o.label, *_frame(o.place, size)) > 0) & o.present[:, None, None] for o in objects], 1
        )
        for k in range(1, len(objects)):
            masks[:, :k] &= ~masks[:, k : k + 1]  # painted later, so in front
        classes = np.stack([o.label for o in objects], 1)
        found += [_annotate(m, c) for m, c in zip(masks, classes, strict=True)]
    return found


def _annotate(masks: Bools, classes: Ints) -> Annotation:
    shown = masks.max((1, 2))
    masks = masks[shown]
    columns, rows = masks.max(1), masks.max(2)
    low = np.stack((columns.argmax(1), rows.argmax(1)), 1)
    high = masks.shape[-1] - np.stack((columns[:, ::-1].argmax(1), rows[:, ::-1].argmax(1)), 1)
    boxes = np.concatenate((low, high), 1).astype(np.float32)
    return Annotation(boxes=boxes, labels=classes[shown], masks=masks)


def _chunks(indices: Indices, size: int) -> Iterator[Indices]:
    indices = np.asarray(indices)
    step = max(_CHUNK_PIXELS // size**2, 1)
    for start in range(0, max(len(indices), 1), step):  # one empty chunk keeps the result's shape
        yield indices[start : start + step]


# Random numbers -----------------------------------------------------------------------------------------


class _Draws:
    """Random numbers as a hash of (seed, split, stream, index, position): no state, so no order matters."""

    def __init__(self, seed: int, split: str) -> None:
        self.key = np.zeros(1, np.uint64)
        for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, zlib.crc32(split.encode())):
            self.key = _mix(self.key + np.uint64(word + 1))

    def uniform(self, indices: Indices, stream: int, count: int) -> Floats:
        """(count, n) numbers in [0, 1); streams are independent of each other."""
        base = _mix(_mix(self.key + np.uint64(stream)) + indices.astype(np.uint64))
        position = np.arange(1, count + 1, dtype=np.uint64)[:, None]
        bits = _mix(base + position * np.uint64(0x9E3779B97F4A7C15))
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)

    def labels(self, indices: Indices) -> Ints:
        """Each block of ten indices goes through its own permutation a·i + b (mod 10)."""
        block, i = np.divmod(indices.astype(np.int64), 10)
        a, b = self.uniform(block, 0, 2)
        factor: Ints = np.array((1, 3, 7, 9))[(a * 4).astype(np.int64)]
        label: Ints = (factor * i + (b * 10).astype(np.int64)) % 10
        return label


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: flipping any input bit flips each output bit half of the time."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# What is in an image ------------------------------------------------------------------------------------


@dataclass
class _Place:
    """Where n things are, in units of the image's side. All (n,)."""

    x: Floats
    y: Floats
    radius: Floats
    turn: Floats  # in [0, 1)


@dataclass
class _Object:
    label: Ints  # (n,)
    present: Bools  # (n,)
    place: _Place
    frequency: Floats  # (n,) periods of the texture per radius
    phase: Floats  # (2, n)
    colors: Floats  # (2, 3, n): figure and ground of the texture


def _object(label: Ints, present: Bools, place: _Place, u: Floats) -> _Object:
    """`u` (10, n): uniform numbers. One color is light and one dark, either way round."""
    light, dark = 0.6 + 0.4 * u[:3], 0.4 * u[3:6]
    colors = np.where(u[6] < 0.5, np.stack((light, dark)), np.stack((dark, light)))
    return _Object(label, present, place, 1.7 + 0.5 * u[7], u[8:10], colors)


def _single(draws: _Draws, rows: Indices) -> _Object:
    u = draws.uniform(rows, 1, 14)
    radius = 0.32 + 0.14 * u[0]
    margin = 1 - 2 * radius
    place = _Place(radius + margin * u[1], radius + margin * u[2], radius, u[3])
    return _object(draws.labels(rows), np.ones(len(rows), bool), place, u[4:])


def _scene(draws: _Draws, rows: Indices) -> list[_Object]:
    """Objects near distinct corners, so that they touch and overlap a little but never hide each other."""
    (count,) = draws.uniform(rows, 2, 1)
    corner = _QUADRANTS[draws.uniform(rows, 3, 4).argsort(0)]  # (4, n, 2)
    objects = []
    for k in range(4):
        u = draws.uniform(rows, 4 + k, 15)
        x, y = corner[k].T + 0.16 * (u[:2] - 0.5)
        place = _Place(x, y, 0.09 + 0.15 * u[2], u[3])
        label = (u[4] * len(CLASS_NAMES)).astype(np.int64)
        objects.append(_object(label, count * 4 >= k, place, u[5:]))
    return objects


# Drawing ------------------------------------------------------------------------------------------------


def _paint(draws: _Draws, rows: Indices, size: int, objects: list[_Object]) -> NDArray[np.uint8]:
    image = _background(draws, rows, size)
    for o in objects:
        u, v = _frame(o.place, size)
        radius_px, depth = o.place.radius * size, _depth(o.label, u, v)
        texture = _texture(o.label % len(TEXTURES), u, v, o.frequency, o.phase, radius_px)
        texture *= _soft(depth - np.float32(_RIM), radius_px)
        figure, ground = o.colors.transpose(0, 2, 1)[..., None, None]
        color = ground + (figure - ground) * texture[:, None]
        cover = _soft(depth, radius_px) * o.present[:, None, None]
        image += (color - image) * cover[:, None]
    return (image * 255 + 0.5).astype(np.uint8).transpose(0, 2, 3, 1)


def _background(draws: _Draws, rows: Indices, size: int) -> Floats:
    """Everything behind the objects: floats (n, 3, size, size) in [0, 1]."""
    image = _color_field(draws.uniform(rows, 8, 3 * (1 + _LATTICE**2)), size)
    u = draws.uniform(rows, 9, 6)
    everywhere = _Place(u[0], u[1], 0.2 + 0.2 * u[2], u[3])
    kind, frame = (u[4] * len(TEXTURES)).astype(np.int64), _frame(everywhere, size)
    pattern = _texture(kind, *frame, 1 + u[5], u[:2], everywhere.radius * size)
    image += ((pattern - 0.5) * 0.15)[:, None]
    for bar in range(_BARS):
        u = draws.uniform(rows, 10 + bar, 9)
        place = _Place(u[0], u[1], 0.03 + 0.06 * u[2], u[3])
        x, y = _frame(place, size)
        length = (1 + 2 * u[4])[:, None, None]
        inside = _soft(1 - np.maximum(np.abs(x) / length, np.abs(y)), place.radius * size)
        image += ((0.15 + 0.7 * u[5:8].T)[..., None, None] - image) * inside[:, None]
    return np.clip(image, 0, 1, out=image)


def _color_field(u: Floats, size: int) -> Floats:
    """Colors that drift smoothly around a random mean, (n, 3, size, size)."""
    mean = 0.3 + 0.4 * u[:3].T[..., None, None]  # (n, 3, 1, 1)
    lattice: Floats = mean + 0.4 * (u[3:].T.reshape(-1, 3, _LATTICE, _LATTICE) - 0.5)
    at = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32((_LATTICE - 1) / size)
    low = np.minimum(at.astype(int), _LATTICE - 2)
    t = at - low.astype(np.float32)
    t = t * t * (3 - 2 * t)
    for axis in (2, 3):
        before, after = lattice.take(low, axis), lattice.take(low + 1, axis)
        lattice = before + (after - before) * (t[:, None] if axis == 2 else t)
    return lattice


def _frame(place: _Place, size: int) -> tuple[Floats, Floats]:
    """Pixels as each thing sees them: turned, about its center, in radii. u and v, each (n, size, size)."""
    turn = (place.turn * len(_TURN)).astype(int)
    cos, sin = (table[turn] / place.radius for table in (_COS, _SIN))
    pixel = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    dx, dy = pixel - place.x[:, None], pixel - place.y[:, None]  # (n, size)
    u = (dx * cos[:, None])[:, None, :] + (dy * sin[:, None])[:, :, None]
    v = (dy * cos[:, None])[:, :, None] - (dx * sin[:, None])[:, None, :]
    return u, v


def _soft(depth: Floats, radius_px: Floats) -> Floats:
    """Share of a pixel inside, from its center's depth below the edge in radii: an edge one pixel wide."""
    share: Floats = np.clip(depth * radius_px[:, None, None] + np.float32(0.5), 0, 1)
    return share


def _depth(label: Ints, u: Floats, v: Floats) -> Floats:
    """How far inside its object each pixel's center is, in radii; negative outside. (n, size, size)."""
    depth = np.empty_like(u)
    for shape, inside in enumerate(_DEPTH):
        which = label // len(TEXTURES) == shape
        depth[which] = inside(u[which], v[which])
    return depth


def _texture(kind: Ints, u: Floats, v: Floats, frequency: Floats, phase: Floats, radius_px: Floats) -> Floats:
    """0 to 1, for each kind in the order of TEXTURES; all but the plain one fill half the plane."""
    f = frequency[:, None, None]
    p, q = phase[..., None, None]
    across, along = u * f + p, v * f + q
    waved = kind == 3
    across[waved] += np.float32(0.8) * _to_line(along[waved] * np.float32(0.6))
    a, b = _to_line(across), _to_line(along)  # distances to the nearest lines of centers, in periods
    depth = np.float32(0.25) - a  # stripes, straight or waved
    dots, checks = kind == 1, kind == 2
    depth[dots] = np.float32(0.4) - np.sqrt(a[dots] ** 2 + b[dots] ** 2)
    x, y = depth[checks], np.float32(0.25) - b[checks]
    depth[checks] = np.minimum(np.abs(x), np.abs(y)) * np.sign(x) * np.sign(y)
    depth[kind == 4] = -1
    return _soft(depth, radius_px / frequency)


def _to_line(x: Floats) -> Floats:
    """Distance to the nearest odd multiple of a half: 0 to 0.5."""
    distance: Floats = np.abs(x - np.floor(x) - np.float32(0.5))
    return distance


def _disc(u: Floats, v: Floats) -> Floats:
    return np.float32(0.86) - np.sqrt(u * u + v * v)


def _cross(u: Floats, v: Floats) -> Floats:
    a, b = np.abs(u), np.abs(v)
    return np.minimum(np.float32(0.34) - np.minimum(a, b), np.float32(0.95) - np.maximum(a, b))


#: Depth of a point inside each shape (negative outside), in radii, in the order of SHAPES.
_DEPTH: tuple[Callable[[Floats, Floats], Floats], ...] = (_disc, _cross)
