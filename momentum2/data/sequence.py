"""A user's own sequence of images as a data set."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from momentum2.data.dataset import Dataset
from momentum2.data.images import Array, BadImage, Picture, Pixels, upright_rgb
from momentum2.errors import UserError

_LOOKED_AT = 16  # items whose labels tell whether all have one


class SequenceDataset(Dataset):
    """Images, or (image, label) pairs, of any sequence: of a list, or of a `torch.utils.data.Dataset` with a length.

    An image is a PIL image, a uint8 array (height, width, 3) or (height, width), or a uint8 tensor (3, height, width).
    Labels are whole numbers from 0.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        n = len(items)
        pairs = [_is_pair(items[i]) for i in range(min(n, _LOOKED_AT))]
        known = getattr(
            items, "targets", None
        )  # as torchvision's data sets have them: no image is read for its label
        if any(pairs) and not all(pairs):
            raise UserError(
                "Some items of the data set are (image, label) pairs and some are not. Label all of them or none."
            )
        labels = None
        if any(pairs):
            given = ((None, known[i]) if known is not None else items[i] for i in range(n))
            labels = np.array([_label(item, i) for i, item in enumerate(given)], np.int64)
        classes = None if labels is None else [str(c) for c in range(int(labels.max()) + 1)]
        super().__init__((f"{i:08d}" for i in range(n)), labels, classes)
        self.items, self.paired = items, any(pairs)

    def picture(self, index: int) -> Picture:
        try:
            item = self.items[index]
        except Exception as error:  # whatever the user's own code raises
            raise BadImage(f"{type(error).__name__}: {error}") from error
        return Array(_pixels(item[0] if self.paired else item, index))

    def stamp(self, index: int) -> str:
        try:
            return hashlib.sha256(self.picture(index).pixels().tobytes()).hexdigest()
        except BadImage as reason:
            return str(reason)


def as_dataset(images: Dataset | Sequence[Any]) -> Dataset:
    """A `Dataset` as it is, and any other sequence of images as one."""
    if isinstance(images, Dataset):
        return images
    if isinstance(images, str | bytes) or not (hasattr(images, "__len__") and hasattr(images, "__getitem__")):
        raise UserError(
            f"A data set must have __len__ and __getitem__; {type(images).__name__} does not. Pass a list, or a torch "
            "Dataset that has both."
        )
    return SequenceDataset(images)


def _is_pair(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2


def _label(item: Any, index: int) -> int:
    label = item[1] if _is_pair(item) else None
    label = label.item() if isinstance(label, torch.Tensor | np.generic) else label
    if not isinstance(label, int) or label < 0:
        raise UserError(
            f"Item {index} of the data set is not a pair of an image and its label, a whole number from 0."
        )
    return label


def _pixels(image: Any, index: int) -> Pixels:
    if isinstance(image, Image.Image):
        return upright_rgb(image)
    if isinstance(image, torch.Tensor) and image.dim() == 3:
        image = image.permute(1, 2, 0).numpy()
    array = np.asarray(image)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, axis=2)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise BadImage(f"item {index} is {array.dtype} {array.shape}, not an 8-bit image")
    return np.ascontiguousarray(array)
