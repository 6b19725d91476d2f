"""From the bytes of one image file to 8-bit pixels, or a `BadImage` that says what is wrong with them."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from momentum2.data import formats
from momentum2.errors import reason

Pixels = NDArray[np.uint8]  # (height, width, channels)
#: What a file holds before it becomes pixels: (height, width) or (height, width, channels) numbers of any kind.
Values = NDArray[Any]

#: Extensions of the files that are taken for images; everything else in a folder is left alone.
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".bmp", ".webp", ".avif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".tga"),
)
#: Extensions of files that are images where there are no others: beside photos they are masks or features.
ARRAY_SUFFIXES = (".npy", ".dcm")
#: What a file may contain, whatever its name says: Pillow knows other formats that start programs to be read.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "AVIF", "TIFF", "PPM", "JPEG2000", "TGA")
#: Larger images are refused as decompression bombs (the limit is Pillow's own).
MAX_PIXELS = formats.MAX_PIXELS
#: Larger files are refused before they are read.
MAX_BYTES = 1 << 30

_BAND = 1 << 20  # pixels that are converted at a time
_ORIENTATION = 0x0112  # EXIF tag
_DEEP = ("I", "F")  # Pillow's modes of more than 8 bits, besides those that begin with I;16

BadImage = formats.BadImage


class NeedsWindow(BadImage):
    """An image of more than 8 bits without a window: nobody has said which of its values are black and white."""

    def __init__(self, values: Values) -> None:
        finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
        self.low, self.high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        self.values, self.kind = values, str(values.dtype)
        super().__init__(f"{self.kind} values from {self.low:g} to {self.high:g}, and data.window is not set")


class OtherChannels(BadImage):
    """An image with another number of channels than was asked for."""

    def __init__(self, values: Values, wanted: int) -> None:
        self.found = f"{' x '.join(map(str, values.shape))} values"
        super().__init__(f"{self.found}, and data.channels is {wanted}")


@dataclass(frozen=True)
class Reading:
    """How the values of a file become pixels.

    Args:
        channels: Of every image: 3 are red, green and blue, 1 is gray, others are taken as they are.
        window: Of images that do not have 8 bits, the values that become 0 and 255; or such a pair for each channel.
    """

    channels: int = 3
    window: tuple[float, ...] | None = None

    def pixels(self, values: Values) -> Pixels:
        """uint8 (height, width, channels) of values as a file has them; raises `BadImage`."""
        values = self.arranged(values)
        if values.dtype == np.bool_:
            values = values.astype(np.uint8) * np.uint8(255)
        if values.dtype != np.uint8:
            values = self._windowed(values)
        if values.shape[2] == 1 and self.channels == 3:
            values = np.repeat(values, 3, axis=2)
        return np.ascontiguousarray(values)

    def arranged(self, values: Values) -> Values:
        """(height, width, channels), whichever axis the channels were on."""
        if values.dtype.kind not in "buif" or values.ndim not in (2, 3) or values.size == 0:
            raise BadImage(f"{values.dtype} values of shape {values.shape} are not an image")
        _refuse_bomb(*values.shape[:2])
        if values.ndim == 2:
            values = values[..., None]
        possible = (self.channels, 1) if self.channels == 3 else (self.channels,)
        for channels in possible:
            for axis in (2, 0):
                if values.shape[axis] == channels:
                    return np.moveaxis(values, axis, 2)
        raise OtherChannels(values, self.channels)

    def _windowed(self, values: Values) -> Pixels:
        if self.window is None:
            raise NeedsWindow(values)
        low, high = np.array(self.window, np.float64).reshape(-1, 2).T
        values = np.where(np.isnan(values), low, values) if values.dtype.kind == "f" else values
        scaled = (np.clip(values.astype(np.float64), low, high) - low) * (255 / (high - low))
        return np.rint(scaled).astype(np.uint8)


RGB = Reading()


class Picture(Protocol):
    """An image whose size is known before its pixels are."""

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the upright image."""

    def pixels(self, reduce: int = 1) -> Pixels:
        """A file that can be decoded at 1/`reduce` of its size (2, 4, 8) may come so, rounded up."""


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
    """The bytes of an image file: its first frame, upright, in 8 bits, over white where transparent."""

    def __init__(self, data: bytes, reading: Reading = RGB) -> None:
        if not data:
            raise BadImage("empty file")
        self.data, self.reading = data, reading

    @cached_property
    def _jpeg(self) -> tuple[int, int] | None:
        """(height, width) as stored, if libjpeg can give the pixels by itself."""
        if not self.data.startswith(b"\xff\xd8\xff") or self.reading.channels not in (1, 3):
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

    @property
    def is_plain(self) -> bool:
        """Whether its header promises 8-bit pixels of one or three channels, which any window leaves alone."""
        if self._jpeg is not None:
            return True
        if formats.of(self.data) not in ("", "tiff") or self.reading.channels != 3:
            return False
        try:
            with _open(self.data) as image:
                return not _is_deep(image)
        except Exception:
            return False

    def values(self) -> Values:
        """The numbers in the file: uint8 where it is an ordinary image, else of the file's own type and range."""
        with _bad_if_it_fails():
            kind = formats.of(self.data)
            if kind in ("npy", "dicom"):
                return formats.READERS[kind](self.data)
            try:
                with _open(self.data) as image:
                    _refuse_bomb(*image.size)
                    if kind == "" and _is_deep_color(image):
                        return formats.read_deep_png(self.data, self.reading.channels)
                    if kind == "" or not _is_beyond_pillow(image, self.reading.channels):
                        return values_of(image, self.reading.channels)
            except UnidentifiedImageError:
                if kind != "tiff":
                    raise
            return formats.read_tiff(self.data, self.reading.channels)

    @cached_property
    def _decoded(self) -> Pixels:
        return self.reading.pixels(self.values())

    @property
    def size(self) -> tuple[int, int]:
        if self._jpeg is None:
            return self._decoded.shape[0], self._decoded.shape[1]
        return self._jpeg[::-1] if self._orientation >= 5 else self._jpeg

    def pixels(self, reduce: int = 1) -> Pixels:
        if self._jpeg is None:
            return self._decoded
        height, width = (-(-side // reduce) for side in self._jpeg)
        colors = "RGB" if self.reading.channels == 3 else "GRAY"
        try:
            stored = simplejpeg.decode_jpeg(self.data, colors, min_height=height, min_width=width)
        except ValueError:
            return self._decoded  # Pillow may be more forgiving; if not, it has the better message
        return _upright(stored, self._orientation)


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=FORMATS)


def values_of(image: Image.Image, channels: int) -> Values:
    """What Pillow opened, turned as its EXIF data says: 8-bit channels, or the values of an image of more bits."""
    image.load()
    values = np.asarray(image) if _is_deep(image) else _eight_bits(image, channels)
    return _upright(values, _orientation(image))


def visible(pixels: Pixels) -> Pixels:
    """Something to look at: (height, width, 3), the first three channels, or the first one in gray."""
    return pixels[..., :3] if pixels.shape[2] >= 3 else np.repeat(pixels[..., :1], 3, axis=2)


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
        raise BadImage(reason(error)) from error


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8. Call after `load` (Pillow turns a TIFF itself and then drops the tag)."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, IndexError):
        return 1  # metadata that cannot be parsed; the pixels may well be fine
    return value if value in range(1, 9) else 1


def _upright(stored: Values, orientation: int) -> Values:
    """The image as it was meant to be seen, contiguous."""
    if orientation >= 5:
        stored = stored.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        stored = stored[:, ::-1]
    if orientation in (3, 4, 7, 8):
        stored = stored[::-1]
    return np.ascontiguousarray(stored)


def _is_deep(image: Image.Image) -> bool:
    """Whether it has more than 8 bits; of colors with 16, Pillow would silently take the upper 8."""
    return image.mode in _DEEP or image.mode.startswith("I;16") or _is_deep_color(image)


def _is_deep_color(image: Image.Image) -> bool:
    raw = [str(tile[3]) for tile in getattr(image, "tile", ())]
    return image.mode in ("RGB", "RGBA", "LA") and any(";16" in mode for mode in raw)


def _is_beyond_pillow(tiff: Image.Image, channels: int) -> bool:
    """Whether tifffile has to read it: 16-bit colors, or bands that are no colors or lie on pages of their own."""
    bands = len(tiff.getbands())
    return _is_deep_color(tiff) or (channels not in (1, 3) and bands != channels)


def _eight_bits(image: Image.Image, channels: int) -> Pixels:
    """uint8 (height, width) or (height, width, bands); conversions only between gray and colors."""
    if channels not in (1, 3) and image.mode != "P":
        return np.array(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return _array(image, "L" if channels == 1 else "RGB")


def _array(image: Image.Image, mode: str) -> Pixels:
    """In another mode, made of bands: Pillow's own way has three copies of a large image in memory at the same time."""
    pixels = np.empty((image.height, image.width, len(mode)), np.uint8)
    rows = max(1, _BAND // image.width)
    for top in range(0, image.height, rows):
        band = (
            image
            if rows >= image.height
            else image.crop((0, top, image.width, min(top + rows, image.height)))
        )
        converted = np.asarray(band if band.mode == mode else band.convert(mode))
        pixels[top : top + rows] = converted.reshape(*converted.shape[:2], -1)
    return pixels
