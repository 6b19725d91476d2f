"""What the names of image files say: which are images, which split and class they belong to."""

import logging
import os
from collections.abc import Collection, Iterable, Sequence
from functools import cache

import numpy as np

from momentum2.data.dataset import Ints
from momentum2.data.images import SUFFIXES
from momentum2.errors import UserError

#: Folder names that divide a data set rather than name a class.
SPLITS = ("train", "val", "valid", "validation", "test", "unlabeled")


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def choose_split(folders: Collection[str], split: str, where: str) -> str:
    """The folder of `split`; "" for the whole, which is what "train" means where nothing is split."""
    if split in folders:
        if beside := sorted(set(folders) - set(SPLITS)):
            _say_once(f'Using only the "{split}" folder of {where}; ignoring {", ".join(beside)}.')
        return split
    splits = sorted(set(folders) & set(SPLITS))
    if split == "train" and not splits:
        return ""
    if splits:
        raise UserError(f"{where} has no split {split!r}. Choose one of {', '.join(splits)}.")
    raise UserError(
        f"{where} is not divided into splits, so it has no {split!r}. Divide it by setting split to 80% and test_split "
        "to -20%."
    )


@cache
def _say_once(sentence: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger("momentum2").warning(sentence)


def labels_from_folders(names: Sequence[str], classes: Iterable[str]) -> tuple[Ints | None, list[str] | None]:
    """Labels if every image lies in one of several folders: its class is the first one."""
    firsts = [name.split("/", 1)[0] if "/" in name else "" for name in names]
    if "" in firsts:
        return None, None
    class_names = sorted({*firsts, *classes})
    if len(class_names) == 1:  # a folder in a folder says nothing
        return None, None
    numbers = {name: number for number, name in enumerate(class_names)}
    return np.array([numbers[first] for first in firsts], np.int64), class_names
