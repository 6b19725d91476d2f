"""What every data set is: an ordered, unchanging set of images with names, and perhaps labels."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from momentum2.data.images import RGB, Array, BadImage, Picture, Pixels, Reading
from momentum2.errors import SettingError

Ints = NDArray[np.int64]
T = TypeVar("T")


class NameList(Sequence[str]):
    """Many names that are not in a list; `digest` changes with any of them or their order."""

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = range(len(self))[index]
        return self._at(found) if isinstance(found, int) else [self._at(i) for i in found]

    @abstractmethod
    def _at(self, i: int) -> str: ...

    @abstractmethod
    def digest(self) -> str: ...


class Names(NameList):
    """Many strings in one block of bytes: a tenth of the memory of a list, and quick to send to a process."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self.text = b"".join(encoded)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    @classmethod
    def of_block(cls, text: bytes, ends: Ints) -> "Names":
        """Those of another one's `text` and `ends`."""
        names = cls(())
        names.text, names.ends = text, ends
        return names

    def __len__(self) -> int:
        return len(self.ends)

    def _at(self, i: int) -> str:
        return self.text[self.ends[i - 1] if i else 0 : self.ends[i]].decode("utf-8", "surrogateescape")

    def digest(self) -> str:
        return hashlib.sha256(self.ends.tobytes() + hashlib.sha256(self.text).digest()).hexdigest()


class Numbered(NameList):
    """The names of images that have none: their numbers, of eight digits or more."""

    def __init__(self, count: int) -> None:
        self.total = count

    def __len__(self) -> int:
        return self.total

    def _at(self, i: int) -> str:
        return f"{i:08d}"

    def digest(self) -> str:
        return f"numbers below {self.total}"


class Chosen(NameList):
    """Some of other names."""

    def __init__(self, names: Sequence[str], order: Ints) -> None:
        self.names, self.order = names, order

    def __len__(self) -> int:
        return len(self.order)

    def _at(self, i: int) -> str:
        return self.names[int(self.order[i])]

    def digest(self) -> str:
        return hashlib.sha256(digest_of(self.names).encode() + self.order.tobytes()).hexdigest()


def digest_of(names: Sequence[str]) -> str:
    """What changes with any of the names or their order."""
    return (names if isinstance(names, NameList) else Names(names)).digest()


class Dataset(ABC):
    """Images 0 to `len - 1`, read in any order, from any process (a data set can be pickled).

    Attributes:
        names: One stable name per image, such as its path relative to the root.
        labels: Class of each image, int64 (n,), or None.
        class_names: What the labels mean, or None.
        fixed_size: (height, width) if all images are known to have the same size.
        in_memory: Reading is no more than copying, so no worker process is needed.
        reading: How what is stored becomes pixels, and of how many channels.
        bad: Images that turned out unreadable so far, and why.
        max_bad_fraction: The share of unreadable images that is tolerated.
    """

    fixed_size: tuple[int, int] | None = None
    in_memory = False
    reading: Reading = RGB
    max_bad_fraction = 1.0

    def __init__(
        self,
        names: Iterable[str],
        labels: Ints | None = None,
        class_names: Iterable[str] | None = None,
    ) -> None:
        # One of our own sequences needs no copy.
        own = isinstance(names, Sequence) and not isinstance(names, list | tuple)
        self.names: Sequence[str] = names if own else Names(names)  # type: ignore[assignment]
        self.labels = labels
        self.class_names = None if class_names is None else tuple(class_names)
        self.bad: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.names)

    @property
    def channels(self) -> int:
        return self.reading.channels

    @abstractmethod
    def picture(self, index: int) -> Picture:
        """Image `index` itself; raises `BadImage` if it cannot be read."""

    @abstractmethod
    def stamp(self, index: int) -> str:
        """Text that changes when the image may have changed (name, size, time)."""

    def read(self, indices: Iterable[int]) -> list[Pixels] | Pixels:
        """Pixels of the images: uint8 (height, width, channels) each, or one (n, height, width, channels) array.

        The next readable image takes the place of an unreadable one.
        """
        return self.fetch(indices)[1]

    def fetch(self, indices: Iterable[int]) -> tuple[Ints, list[Pixels] | Pixels]:
        """Like `read`, preceded by the indices of the images that were actually used."""
        found = [self.good(int(i), lambda picture: picture.pixels()) for i in indices]
        return np.array([i for i, _ in found], np.int64), [pixels for _, pixels in found]

    def good(self, index: int, use: Callable[[Picture], T]) -> tuple[int, T]:
        """`use(picture)` of image `index` or, if it is unreadable, of the next readable one (with its index).

        Unreadable images are added to `bad`; more of them than tolerated are a `UserError`.
        """
        for i in chain(range(index, len(self)), range(index)):
            if i not in self.bad:
                try:
                    return i, use(self.picture(i))
                except BadImage as reason:
                    self.bad[i] = str(reason)
                    self.check_bad()
        self.check_bad()
        raise AssertionError("every image is bad and yet that is tolerated")

    def check_bad(self, listed: int = 0, listed_in: str = "") -> None:
        """Raise a `UserError` if more images are bad than tolerated, according to `bad` or to a list of them."""
        count = max(len(self.bad), listed)
        if count > self.max_bad_fraction * len(self) or count == len(self):
            first = min(self.bad)
            where = f" All are listed in {listed_in}." if listed_in else ""
            raise SettingError(
                "data.max_bad_fraction",
                f"is {self.max_bad_fraction:g}, but {count:,} of {len(self):,} images cannot be read, such as "
                f"{self.names[first]} ({self.bad[first]}).{where} Repair or remove them, or raise this limit.",
            )


class FixedSize(Dataset):
    """A data set that gives any number of its images, which have one size, at a time."""

    @abstractmethod
    def gather(self, indices: Ints) -> Pixels:
        """uint8 (n, height, width, channels)."""

    def picture(self, index: int) -> Picture:
        return Array(self.gather(np.array([index]))[0])

    def fetch(self, indices: Iterable[int]) -> tuple[Ints, list[Pixels] | Pixels]:
        taken = np.asarray(indices, np.int64)
        return taken, self.gather(taken)

    def stamp(self, index: int) -> str:
        return self.names[index]


class Subset(Dataset):
    """Some images of a data set, in the given order."""

    def __init__(self, whole: Dataset, order: Ints) -> None:
        labels = None if whole.labels is None else whole.labels[order]
        super().__init__(Chosen(whole.names, order), labels, whole.class_names)
        self.whole, self.order = whole, order
        self.fixed_size, self.in_memory, self.reading = whole.fixed_size, whole.in_memory, whole.reading

    def picture(self, index: int) -> Picture:
        return self.whole.picture(int(self.order[index]))

    def stamp(self, index: int) -> str:
        return self.whole.stamp(int(self.order[index]))

    def fetch(self, indices: Iterable[int]) -> tuple[Ints, list[Pixels] | Pixels]:
        if self.fixed_size is None:
            return super().fetch(indices)
        taken = np.asarray(indices, np.int64)
        return taken, self.whole.read(self.order[taken])
