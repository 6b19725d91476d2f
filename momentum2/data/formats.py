"""Files that Pillow cannot read, or not in full: arrays, TIFFs of many bands, DICOM, 16-bit colors in a PNG.

Each reader gives the numbers in the file, (height, width) or with a third axis of channels, and runs nothing that the
file says: no pickle is read, and of a DICOM file only the tags that describe its pixels.
"""

import io
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: Larger images are refused as decompression bombs (the limit is Pillow's own).
MAX_PIXELS = 2 * 89_478_485
_MAX_VALUES = 4 * MAX_PIXELS

_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_NPY = b"\x93NUMPY"
#: What is read of a DICOM file; names, dates and all that is about a patient stay in it.
_DICOM_TAGS = (
    *("Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration"),
    *("NumberOfFrames", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation"),
    *("RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "PixelData"),
)


class BadImage(Exception):
    """An image that cannot be read; the message is the reason."""


def of(data: bytes) -> str:
    """The format, by the first bytes: npy, dicom, tiff, or the empty string for others."""
    if data.startswith(_NPY):
        return "npy"
    if data[128:132] == b"DICM":
        return "dicom"
    return "tiff" if data.startswith(_TIFF) else ""


def read_npy(data: bytes) -> NDArray[Any]:
    """The array of an .npy file."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject or dtype.kind not in "buif":
        raise BadImage(f"an array of {dtype}, not of numbers")
    _refuse_large(shape)
    count = int(np.prod(shape, dtype=np.int64))
    if len(data) - file.tell() < count * dtype.itemsize:
        raise BadImage("the file ends before its array does")
    values = np.frombuffer(data, dtype, count, file.tell())
    return values.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), copy=False)


def read_dicom(data: bytes) -> NDArray[Any]:
    """One image of a DICOM file in the units of its rescaling, such as Hounsfield's; white is always high."""
    try:
        import pydicom
        from pydicom.pixels.processing import apply_modality_lut
    except ImportError:
        raise BadImage("DICOM needs an extra: pip install 'momentum2[dicom]'") from None
    header = pydicom.dcmread(io.BytesIO(data), specific_tags=list(_DICOM_TAGS))
    if "PixelData" not in header:
        raise BadImage("a DICOM file without an image")
    if int(header.get("NumberOfFrames") or 1) != 1:
        raise BadImage(f"a DICOM file of {header.NumberOfFrames} frames; save each as a separate file")
    _refuse_large((int(header.Rows), int(header.Columns), int(header.get("SamplesPerPixel", 1))))
    stored = header.pixel_array
    if stored.ndim == 3:
        return np.asarray(stored)
    if header.get("PhotometricInterpretation") == "MONOCHROME1":  # which is white at its lowest value
        stored = (-1 if header.PixelRepresentation else 2 ** int(header.BitsStored) - 1) - stored
    return np.asarray(apply_modality_lut(stored, header))


def read_tiff(data: bytes, channels: int) -> NDArray[Any]:
    """A TIFF with all of its bands, whether in one page or in a page each."""
    try:
        import tifffile
    except ImportError:
        raise BadImage("such a TIFF needs an extra: pip install 'momentum2[tiff]'") from None
    tifffile.logger().setLevel(logging.CRITICAL)  # what is wrong with a file is said by its exception, once
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages.first
        _refuse_large(page.shape)
        if math.prod(page.chunked) > len(data):  # each has its place in the file, unless it is made up
            raise BadImage(f"{math.prod(page.chunked):,} parts in a file of {len(data):,} bytes")
        if channels in page.shape or channels in (1, 3) or not file.series:
            return np.asarray(page.asarray())
        _refuse_large(file.series[0].shape)
        return np.asarray(file.series[0].asarray())


def read_deep_png(data: bytes, channels: int) -> NDArray[Any]:
    """16-bit colors, of which Pillow gives one byte at a time: the upper ones and, read as if swapped, the lower."""
    halves = []
    for order in ("16B", "16L"):
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.mode not in ("RGB", "RGBA"):
                raise BadImage("16-bit gray with transparency, which Pillow reduces to 8 bits")
            image.tile = [tile._replace(args=f"{image.mode};{order}") for tile in image.tile]
            halves.append(np.asarray(image).astype(np.uint16))
    values = halves[0] << 8 | halves[1]
    return values[..., :3] if channels == 3 else values


def _refuse_large(shape: tuple[int, ...]) -> None:
    if any(side < 1 for side in shape) or float(np.prod(np.array(shape, np.float64))) > _MAX_VALUES:
        raise BadImage(f"{' x '.join(map(str, shape))} values, refused as a decompression bomb")


READERS: dict[str, Callable[[bytes], NDArray[Any]]] = {"npy": read_npy, "dicom": read_dicom}
