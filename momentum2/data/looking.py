"""A look at some of the images before anything is made of them: do their values and channels fit the settings?"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from momentum2.config import DataConfig
from momentum2.data.dataset import Dataset
from momentum2.data.images import BadImage, Encoded, NeedsWindow, OtherChannels, Picture, Reading
from momentum2.errors import SettingError

_LOOKED_AT = 64


def some(dataset: Dataset, count: int = _LOOKED_AT) -> list[int]:
    """Indices of up to `count` images, evenly spaced."""
    n = len(dataset)
    spaced = np.linspace(0, max(n - 1, 0), min(n, count)).astype(np.int64)
    return [int(index) for index in np.unique(spaced)]


def some_pictures(dataset: Dataset, count: int = _LOOKED_AT) -> Iterator[tuple[int, Picture]]:
    """Those of them that can be opened."""
    for index in some(dataset, count):
        try:
            yield index, dataset.picture(index)
        except BadImage:
            continue  # named when it is read in training


def some_sizes(dataset: Dataset) -> list[tuple[int, int]]:
    """(height, width) of those of them that can be read so far."""
    sizes = []
    for _, picture in some_pictures(dataset):
        with suppress(BadImage):
            sizes.append(picture.size)
    return sizes


def reading_of(data: DataConfig) -> Reading:
    """How a config section has its images read; refuses a window that makes no sense."""
    window = data.window
    if window is None:
        return Reading(data.channels)
    if len(window) not in (2, 2 * data.channels):
        pairs = "2" if data.channels == 1 else f"2 or {2 * data.channels}"
        raise SettingError("data.window", f"must have {pairs} values, low and high, not {len(window)}.")
    for low, high in zip(window[::2], window[1::2], strict=True):
        if not (np.isfinite(low) and np.isfinite(high) and low < high):
            raise SettingError(
                "data.window", f"must have a low value below the high one, not {low:g},{high:g}."
            )
    return Reading(data.channels, tuple(window))


@dataclass
class _Range:
    """Of the values in images that need a window."""

    name: str
    kind: str
    low: float
    high: float
    count: int = 0


def check_reading(dataset: Dataset) -> None:
    """Refuse, in a sentence that says what to set, images that need a window or have other channels."""
    found: _Range | None = None
    if dataset.fixed_size is not None:  # arrays of bytes
        return
    for index, picture in some_pictures(dataset):
        if isinstance(picture, Encoded) and picture.is_plain:
            continue
        try:
            picture.pixels()
        except NeedsWindow as need:
            if found is None:
                found = _Range(dataset.names[index], need.kind, need.low, need.high)
            found.low, found.high = min(found.low, need.low), max(found.high, need.high)
            found.count += 1
        except OtherChannels as other:
            raise SettingError(
                "data.channels",
                f"is {dataset.channels}, but {dataset.names[index]} has {other.found}. "
                "Set it to the number of channels.",
            ) from None
        except BadImage:
            continue
    if found is not None:
        several = f"; of {found.count} images looked at they go" if found.count > 1 else ","
        raise SettingError(
            "data.window",
            f"is not set, but {found.name} has {found.kind} values{several} from {found.low:g} to {found.high:g}. "
            f"Set it to the values that become black and white: {found.low:.12g},{found.high:.12g} "
            "covers all of these.",
        )
