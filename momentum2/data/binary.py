"""CIFAR-10, CIFAR-100 and STL-10 in the files that their authors publish and torchvision downloads."""

import io
import pickle
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from momentum2.data.dataset import FixedSize, Ints
from momentum2.data.images import Pixels
from momentum2.data.layout import no_split
from momentum2.errors import SettingError, UserError
from momentum2.files import read, read_text

#: Bytes of the largest batch (CIFAR-100's has 155 million), and of the other files.
_BATCH, _TEXT = 1 << 28, 1 << 24
#: What reading files that are not as published can raise, unpickling included.
_DAMAGE = (
    *(OSError, KeyError, ValueError, TypeError, AttributeError, IndexError, EOFError, OverflowError),
    *(pickle.UnpicklingError, struct.error, AssertionError, MemoryError, RecursionError),
)


class Cifar(FixedSize):
    """CIFAR in memory; `images` is (n, 32, 32, 3)."""

    in_memory = True

    def __init__(self, images: Pixels, labels: Ints, classes: list[str], split: str) -> None:
        super().__init__((f"{split}/{i:05d}" for i in range(len(images))), labels, classes)
        self.images = images
        self.fixed_size = 32, 32

    def gather(self, indices: Ints) -> Pixels:
        return np.take(self.images, indices, axis=0)


class Stl10(FixedSize):
    """STL-10, mapped: one file of (3, width, height) images for each part of the split."""

    in_memory = True

    def __init__(self, files: list[Path], labels: Ints | None, classes: list[str]) -> None:
        self.files = files
        super().__init__(
            (
                f"{file.name.removesuffix('_X.bin')}/{i:06d}"
                for file, part in self._parts
                for i in range(len(part))
            ),
            labels,
            classes,
        )
        self.fixed_size = 96, 96

    @cached_property
    def _parts(self) -> list[tuple[Path, NDArray[np.uint8]]]:
        return [(file, np.memmap(file, np.uint8, "r").reshape(-1, 3, 96, 96)) for file in self.files]

    def __getstate__(self) -> dict[str, Any]:
        # Each process maps the files itself.
        return {name: value for name, value in self.__dict__.items() if name != "_parts"}

    def gather(self, indices: Ints) -> Pixels:
        images = np.empty((len(indices), 96, 96, 3), np.uint8)
        first = 0
        for _, part in self._parts:
            here = np.flatnonzero((indices >= first) & (indices < first + len(part)))
            images[here] = part[indices[here] - first].transpose(0, 3, 2, 1)
            first += len(part)
        return images


def open_cifar(root: Path, split: str, classes: int) -> Cifar:
    """CIFAR-10 or CIFAR-100 (fine labels) in its binary or its Python form, in or below `root`."""
    if split not in ("train", "test"):
        raise no_split(f"CIFAR-{classes}", split, ("train", "test"))
    binary = ("cifar-10-batches-bin", "cifar-100-binary")[classes == 100]
    python = ("cifar-10-batches-py", "cifar-100-python")[classes == 100]
    folder = _find(root, (binary, python), f"cifar{classes}")
    if classes == 10:
        stems = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
        names, names_key = ("batches.meta.txt", "batches.meta"), "label_names"
    else:
        stems = [split]
        names, names_key = ("fine_label_names.txt", "meta"), "fine_label_names"
    try:
        if (folder / f"{stems[0]}.bin").is_file():
            parts = [_read_cifar_binary(folder / f"{stem}.bin", classes) for stem in stems]
            class_names = read_text(folder / names[0], _TEXT).split()
        else:
            parts = [_read_cifar_pickle(folder / stem, classes) for stem in stems]
            class_names = [str(name) for name in _load_pickle(folder / names[1])[names_key]]
        planes, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        images = np.ascontiguousarray(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        _check_labels(labels, len(images), class_names)
    except _DAMAGE as error:
        raise UserError(
            f"CIFAR-{classes} in {folder} is incomplete or corrupt ({error}). Download it again."
        ) from error
    return Cifar(images, labels, class_names, split)


def open_stl10(root: Path, split: str) -> Stl10:
    """STL-10; the split is unlabeled, train, test or train+unlabeled, of which train and test have labels."""
    splits = ("unlabeled", "train", "test", "train+unlabeled")
    if split not in splits:
        raise no_split("STL-10", split, splits)
    folder = _find(root, ("stl10_binary",), "stl10")
    files = [folder / f"{part}_X.bin" for part in split.split("+")]
    labels = None
    try:
        classes = read_text(folder / "class_names.txt", _TEXT).split()
        if split in ("train", "test"):
            labels = np.frombuffer(read(folder / f"{split}_y.bin", _TEXT), np.uint8).astype(np.int64) - 1
        for file in files:
            if not file.is_file():  # a named pipe would wait for a writer
                raise ValueError(f"{file.name} is not a file")
        dataset = Stl10(files, labels, classes)
        if labels is not None:
            _check_labels(labels, len(dataset), classes)
    except _DAMAGE as error:
        raise UserError(
            f"STL-10 in {folder} is incomplete or corrupt ({error}). Download it again."
        ) from error
    return dataset


def _check_labels(labels: Ints, images: int, classes: list[str]) -> None:
    if len(labels) != images:
        raise ValueError(f"{len(labels)} labels for {images} images")
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError("labels without a class name")


def _find(root: Path, folders: tuple[str, ...], name: str) -> Path:
    for folder in (*(root / folder for folder in folders), *([root] if root.name in folders else [])):
        if folder.is_dir():
            return folder
    raise SettingError(
        "data.root",
        f"{root} contains no {' or '.join(folders)}. Pass the folder that does, or set download to true to fetch "
        f"{name}.",
    )


def _read_cifar_binary(path: Path, classes: int) -> tuple[NDArray[np.uint8], Ints]:
    """Rows of one label (CIFAR-100: the coarse one, then the fine one) and 3072 bytes."""
    before = 1 if classes == 10 else 2
    rows = np.frombuffer(read(path, _BATCH), np.uint8).reshape(-1, before + 3072)
    return rows[:, before:], rows[:, before - 1].astype(np.int64)


def _read_cifar_pickle(path: Path, classes: int) -> tuple[NDArray[np.uint8], Ints]:
    content = _load_pickle(path)
    data = content["data"]
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        raise ValueError(f"{path.name} holds no images")
    return data.reshape(-1, 3072), np.array(content["labels" if classes == 10 else "fine_labels"], np.int64)


def _load_pickle(path: Path) -> dict[str, Any]:
    content = _PlainUnpickler(io.BytesIO(read(path, _BATCH)), encoding="latin1").load()
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no table")
    return content


class _PlainUnpickler(pickle._Unpickler):
    """Reads dicts, lists, text, numbers and arrays of bytes; whatever else one asks for could run code.

    In Python, because the one in C takes memory for whatever a file says that it will need.
    """

    def find_class(self, module: str, name: str) -> Any:
        match module.removeprefix("numpy").removeprefix(".core").removeprefix("._core"), name:
            case ".multiarray", "_reconstruct":
                return _empty_array
            case "_codecs", "encode":
                return _latin1
            case "", "ndarray":
                return "ndarray"  # only named, for `_empty_array`: calling it would be room for any size
            case "", "dtype":
                return _uint8
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    return text.encode("latin1")


def _empty_array(kind: Any, shape: Any, dtype: Any) -> NDArray[np.uint8]:
    return np.ndarray((0,), np.uint8)


def _uint8(code: str, align: Any = False, copy: Any = False) -> np.dtype[np.uint8]:
    if code != "u1":
        raise pickle.UnpicklingError(f"it contains an array of {code}, not of bytes")
    return np.dtype(np.uint8)
