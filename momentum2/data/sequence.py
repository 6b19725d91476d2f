"""A user's own sequence of images as a data set."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import IterableDataset

from momentum2.data.dataset import Dataset, Numbered
from momentum2.data.images import Array, BadImage, Picture, Values, values_of
from momentum2.errors import UserError, reason

_LOOKED_AT = 16  # items whose labels tell whether all have one
_IMAGE_KEYS = ("image", "img", "pixel_values")
_LABEL_KEYS = ("label", "labels", "fine_label", "target")


class SequenceDataset(Dataset):
    """Images, (image, label) pairs or dicts with "image" and perhaps "label", of any sequence.

    A sequence is a list, a `torch.utils.data.Dataset` or another object with `__len__` and `__getitem__`. An image is a
    PIL image, an array (height, width, channels) or (height, width), or a tensor (channels, height, width). Numbers of
    more than 8 bits, floats in [0, 1] among them, need a window. Labels are whole numbers from 0.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        n = len(items)
        self.items = items
        self.keys = _keys([items[i] for i in range(min(n, _LOOKED_AT))])
        labels = None
        if self.keys[1] is not None:
            # As torchvision's data sets have them: no image is read for its label.
            known = getattr(items, "targets", None) if self.keys[1] == 1 else None
            given = known if known is not None else (_part(items[i], self.keys[1]) for i in range(n))
            labels = _labels(given, n)
        classes = None if labels is None else [str(c) for c in range(int(labels.max()) + 1)]
        super().__init__(Numbered(n), labels, classes)

    def picture(self, index: int) -> Picture:
        try:
            item = self.items[index]
        except Exception as error:  # whatever the user's own code raises
            raise BadImage(reason(error)) from error
        return Array(self.reading.pixels(as_values(_part(item, self.keys[0]), self.channels)))

    def stamp(self, index: int) -> str:
        try:
            return hashlib.sha256(self.picture(index).pixels().tobytes()).hexdigest()
        except BadImage as reason:
            return str(reason)


def as_dataset(images: Dataset | Sequence[Any]) -> Dataset:
    """A `Dataset` as it is, and any other sequence of images as one."""
    if isinstance(images, Dataset):
        return images
    if isinstance(images, IterableDataset):
        raise UserError(
            f"{type(images).__name__} is an IterableDataset: its images cannot be indexed, so their order could "
            "not be repeated or resumed. Pass a Dataset with __len__ and __getitem__."
        )
    if isinstance(images, str | bytes) or not (hasattr(images, "__len__") and hasattr(images, "__getitem__")):
        raise UserError(
            f"A data set must have __len__ and __getitem__; {type(images).__name__} does not. Pass a list, or a torch "
            "Dataset that has both."
        )
    if len(images) == 0:
        raise UserError("The data set has no images.")
    return SequenceDataset(images)


def as_values(image: Any, channels: int) -> Values:
    """The numbers of an image as Python programs have them; raises `BadImage` for anything else."""
    if isinstance(image, Image.Image):
        return values_of(image, channels)
    if isinstance(image, torch.Tensor):
        image = image.detach().cpu()
        return np.asarray(image.permute(1, 2, 0).numpy() if image.dim() == 3 else image.numpy())
    if isinstance(image, np.ndarray):
        return image
    raise BadImage(f"{type(image).__name__} is not a PIL image, an array or a tensor")


def _keys(items: Sequence[Any]) -> tuple[int | str | None, int | str | None]:
    """Where in an item its image is, and where its label; None where the item is the image, or has no label."""
    found = {_keys_of(item) for item in items}
    if len(found) > 1:
        raise UserError(
            "Some items of the data set are (image, label) pairs and some are not. Label all of them or none."
        )
    return found.pop()


def _keys_of(item: Any) -> tuple[int | str | None, int | str | None]:
    if isinstance(item, dict):
        image = next((key for key in _IMAGE_KEYS if key in item), None)
        if image is None:
            raise UserError(
                f'The items of the data set are dicts without "image" (found: {", ".join(map(str, item))}).'
            )
        return image, next((key for key in _LABEL_KEYS if key in item), None)
    if isinstance(item, tuple | list):
        return (0, 1) if len(item) == 2 else (0, None)
    return None, None


def _part(item: Any, key: int | str | None) -> Any:
    try:
        return item if key is None else item[key]
    except (KeyError, IndexError, TypeError):
        raise BadImage(f"an item without {key!r}") from None


def _labels(given: Iterable[Any], n: int) -> np.ndarray:
    labels = np.empty(n, np.int64)
    for i, label in zip(range(n), given, strict=True):
        label = label.item() if isinstance(label, torch.Tensor | np.generic) else label
        if not isinstance(label, int) or label < 0:
            raise UserError(
                f"Item {i} of the data set is not a pair of an image and its label, a whole number from 0."
            )
        labels[i] = label
    return labels
