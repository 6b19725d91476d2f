"""From the bytes of one image file to RGB pixels, or a `BadImage` that says what is wrong with them."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Protocol

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

Pixels = NDArray[np.uint8]  # (height, width, 3)

#: Extensions of the files that are taken for images; everything else in a folder is left alone.
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".avif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga"),
)
#: What a file may contain, whatever its name says: Pillow knows other formats that start programs to be read.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "AVIF", "TIFF", "PPM", "JPEG2000", "TGA")
#: Larger images are refused as decompression bombs (the limit is Pillow's own).
MAX_PIXELS = 2 * 89_478_485
#: Larger files are refused before they are read.
MAX_BYTES = 1 << 30

_BAND = 1 << 20  # pixels that are converted at a time
_ORIENTATION = 0x0112  # EXIF tag


class BadImage(Exception):
    """An image that cannot be read; the message is the reason."""


class Picture(Protocol):
    """An image whose size is known before its pixels are."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the upright image."""

    def pixels(self, reduce: int = 1) -> Pixels:
        """RGB; a file that can be decoded at 1/`reduce` of its size (2, 4, 8) may come so, rounded up."""


class Array:
    """An image that is in memory."""

    def __init__(self, array: Pixels) -> None:
        self.array = array

    @property
    def size(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def pixels(self, reduce: int = 1) -> Pixels:
        return self.array


class Encoded:
    """The bytes of an image file: upright RGB of its first frame, in 8 bits, over white where transparent."""

    def __init__(self, data: bytes) -> None:
        if not data:
            raise BadImage("empty file")
        self.data = data

    @cached_property
    def _jpeg(self) -> tuple[int, int] | None:
        """(height, width) as stored, if libjpeg can give RGB by itself."""
        if not self.data.startswith(b"\xff\xd8\xff"):
            return None
        try:
            height, width, colors, _ = simplejpeg.decode_jpeg_header(self.data)
        except ValueError:
            return None
        _refuse_bomb(width, height)
        return (height, width) if colors in ("YCbCr", "Gray", "RGB") else None

    @cached_property
    def _orientation(self) -> int:
        if b"Exif\x00\x00" not in self.data:
            return 1
        with _bad_if_it_fails():
            return _orientation(_open(self.data))

    @cached_property
    def _decoded(self) -> Pixels:
        with _bad_if_it_fails(), _open(self.data) as image:
            _refuse_bomb(*image.size)
            return upright_rgb(image)

    @property
    def size(self) -> tuple[int, int]:
        if self._jpeg is None:
            return self._decoded.shape[0], self._decoded.shape[1]
        return self._jpeg[::-1] if self._orientation >= 5 else self._jpeg

    def pixels(self, reduce: int = 1) -> Pixels:
        if self._jpeg is None:
            return self._decoded
        height, width = (-(-side // reduce) for side in self._jpeg)
        try:
            stored = simplejpeg.decode_jpeg(self.data, "RGB", min_height=height, min_width=width)
        except ValueError:
            return self._decoded  # Pillow may be more forgiving; if not, it has the better message
        return _upright(stored, self._orientation)


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def upright_rgb(image: Image.Image) -> Pixels:
    """The image that Pillow opened: turned as its EXIF data says, in 8 bits, over white where transparent."""
    image.load()
    return _upright(_rgb(image), _orientation(image))


def refuse_large(size: int) -> None:
    """Raise `BadImage` if a file has more bytes than any image should."""
    if size > MAX_BYTES:
        raise BadImage(f"{size:,} bytes, larger than the limit of {MAX_BYTES:,}")


def _refuse_bomb(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise BadImage(f"{width} x {height} pixels, refused as a decompression bomb")


@contextmanager
def _bad_if_it_fails() -> Iterator[None]:
    """Pillow's plugins raise nearly every built-in exception on corrupt files."""
    try:
        yield
    except BadImage:
        raise
    except UnidentifiedImageError:
        raise BadImage("not an image in a known format") from None
    except Exception as error:
        raise BadImage(" ".join(f"{type(error).__name__}: {error}".split())) from error


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8. Call after `load` (Pillow turns a TIFF itself and then drops the tag)."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, IndexError):
        return 1  # metadata that cannot be parsed; the pixels may well be fine
    return value if value in range(1, 9) else 1


def _upright(stored: Pixels, orientation: int) -> Pixels:
    """The image as it was meant to be seen, contiguous."""
    if orientation >= 5:
        stored = stored.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        stored = stored[:, ::-1]
    if orientation in (3, 4, 7, 8):
        stored = stored[::-1]
    return np.ascontiguousarray(stored)


def _rgb(image: Image.Image) -> Pixels:
    if image.mode.startswith("I;16"):
        return _gray(np.asarray(image).astype(np.float64), 65535)
    if image.mode in ("I", "F"):
        return _gray(*_with_white(np.asarray(image).astype(np.float64), image.mode))
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return _array(image)


def _array(image: Image.Image) -> Pixels:
    """RGB, made of bands: Pillow's own way has three copies of a large image in memory at the same time."""
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = (
            image
            if rows >= image.height
            else image.crop((0, top, image.width, min(top + rows, image.height)))
        )
        pixels[top : top + rows] = np.asarray(band if band.mode == "RGB" else band.convert("RGB"))
    return pixels


def _with_white(values: NDArray[np.float64], mode: str) -> tuple[NDArray[np.float64], float]:
    """Values from 0 on and the value of white. Integers have 16 bits, floats are 0 to 1 or 0 to 255; anything
    outside that is stretched from its smallest to its largest value."""
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    for white in (65535.0,) if mode == "I" else (1.0, 255.0):
        if low >= 0 and high <= white:
            return values, white
    return values - low, max(high - low, 1e-300)


def _gray(values: NDArray[np.float64], white: float) -> Pixels:
    return np.repeat(np.rint(values * (255 / white)).astype(np.uint8)[..., None], 3, axis=2)
