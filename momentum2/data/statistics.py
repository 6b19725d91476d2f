"""What values images have: their range, for the window, and the mean and spread of each channel."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from momentum2.data.dataset import Dataset
from momentum2.data.images import BadImage, Encoded, NeedsWindow, Reading, Values
from momentum2.data.looking import some, some_pictures
from momentum2.errors import SettingError

PERCENTILES = (0, 0.5, 50, 99.5, 100)
_VALUES = 65_536  # of one image that are counted, evenly spaced


@dataclass(frozen=True)
class Statistics:
    """Of the values as they are stored, and of the pixels that the given or found window makes of them.

    Args:
        images: How many were looked at.
        kind: Type of the values, such as uint16.
        percentiles: (channels, 5): least, 0.5 %, median, 99.5 %, largest.
        window: Low and high value that become 0 and 255; None where the values have 8 bits.
        mean: Of each channel, in [0, 1].
        std: Of each channel.
    """

    images: int
    kind: str
    percentiles: NDArray[np.float64]
    window: tuple[float, ...] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def settings(self) -> dict[str, str]:
        """The settings that fit, by name, as text."""
        found = {"data.channels": str(len(self.mean))} if len(self.mean) != 3 else {}
        if self.window is not None:
            found["data.window"] = ",".join(f"{value:.6g}" for value in self.window)
        for name, values in (("data.mean", self.mean), ("data.std", self.std)):
            found[name] = ",".join(f"{value:.4f}" for value in values)
        return found


def channels_of(dataset: Dataset) -> int:
    """The number of channels of the first image that can be read; 3 where it is an ordinary one."""
    for _, picture in some_pictures(dataset):
        if not isinstance(picture, Encoded) or picture.is_plain:
            return 3
        with suppress(BadImage):
            shape = Encoded(picture.data, Reading(channels=0)).values().shape  # all bands, however many
            return min(shape[0], shape[2]) if len(shape) == 3 else 3
    return 3


def measure(dataset: Dataset, count: int = 256) -> Statistics:
    """Look at up to `count` images, evenly spaced.

    Without a window, one from the 0.5th to the 99.5th percentile is proposed.
    """
    looked_at = [values for index in some(dataset, count) if (values := _values(dataset, index)) is not None]
    if not looked_at:
        raise SettingError("data.root", "has no image that can be read among those looked at.")
    channels = {values.shape[1] for values in looked_at}
    if len(channels) > 1:
        raise SettingError(
            "data.channels", f"must be one number, but images have {sorted(channels)} channels."
        )
    values = np.concatenate(looked_at)
    kinds = sorted({str(one.dtype) for one in looked_at})
    numbers = values.astype(np.float64)
    numbers[~np.isfinite(numbers)] = np.nan
    if np.isnan(numbers).all(0).any():
        raise SettingError(
            "data.root", "has a channel without finite values. Check the images, or set data.channels."
        )
    ranges = np.nanpercentile(numbers, PERCENTILES, axis=0).T
    window = dataset.reading.window
    if kinds != ["uint8"] and window is None:
        low, high = float(ranges[:, 1].min()), float(ranges[:, 3].max())
        window = (low, high) if low < high else (low, low + max(1.0, abs(low) * 1e-6))
    pixels = values / 255 if window is None else _scaled(values, window)
    mean, std = pixels.mean(0), np.maximum(pixels.std(0), 1 / 255)
    return Statistics(
        len(looked_at),
        ", ".join(kinds),
        ranges,
        None if kinds == ["uint8"] else window,
        tuple(mean.tolist()),
        tuple(std.tolist()),
    )


def _scaled(values: NDArray[np.float64], window: tuple[float, ...]) -> NDArray[np.float64]:
    low, high = np.array(window).reshape(-1, 2).T
    scaled: NDArray[np.float64] = (np.clip(np.nan_to_num(values, nan=low.min()), low, high) - low) / (
        high - low
    )
    return scaled


def _values(dataset: Dataset, index: int) -> NDArray[np.float64] | None:
    """(n, channels) of the image's own type, or None if it cannot be read."""
    try:
        picture = dataset.picture(index)
        values: Values = picture.values() if isinstance(picture, Encoded) else picture.pixels()
    except NeedsWindow as need:
        values = need.values
    except BadImage:
        return None
    try:
        values = dataset.reading.arranged(values)
    except BadImage:
        return None
    flat = values.reshape(-1, values.shape[2])
    if values.shape[2] == 1 and dataset.channels == 3:
        flat = np.repeat(flat, 3, axis=1)
    return np.asarray(flat[:: max(1, len(flat) // _VALUES)])
