"""What the names of image files say: which are images, which split and class they belong to."""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from momentum2.data.dataset import Ints
from momentum2.data.images import ARRAY_SUFFIXES, SUFFIXES
from momentum2.errors import UserError
from momentum2.terminal import is_first

#: How names begin that nobody means.
HIDDEN = (".", "__MACOSX")
#: Folder names that divide a data set rather than name a class.
SPLITS = ("train", "val", "valid", "validation", "test", "unlabeled")
_WORDS = {**{word: word for word in reversed(SPLITS)}, "training": "train", "testing": "test"}


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def is_array(name: str) -> bool:
    return name.lower().endswith(ARRAY_SUFFIXES)


def images_among(names: Iterable[str], where: str) -> list[str]:
    """The names of image files; arrays (.npy, .dcm) are images where there are no others."""
    names = list(names)
    images, arrays = ([name for name in names if fits(name)] for fits in (is_image, is_array))
    if images and arrays:
        _say_once(
            f"Using the {len(images):,} image files in {where}; ignoring {len(arrays):,} arrays (.npy, .dcm)."
        )
    return images or arrays


def is_hidden(name: str) -> bool:
    return name.startswith(HIDDEN)


def split_word(folder: str) -> str | None:
    """The split that a folder is, such as train for train, train2017 or Train_2; None for others."""
    found = re.fullmatch(rf"({'|'.join(_WORDS)})(?:[-_ ]?\d+)*", folder, re.IGNORECASE)
    return None if found is None else _WORDS[found[1].lower()]


def split_in(name: str) -> str | None:
    """The split that the path of a shard says, such as train for train-0001.tar, x_train_01.tar and train/01.tar."""
    found = re.search(rf"(?:^|[-_./])({'|'.join(_WORDS)})(?=[-_./]|\d|$)", name, re.IGNORECASE)
    return None if found is None else _WORDS[found[1].lower()]


def choose_split(folders: Collection[str], split: str, where: str) -> str:
    """The folder of `split`; "" for the whole, which is what "train" means where nothing is split."""
    fitting = [split] if split in folders else sorted(f for f in folders if split_word(f) == split)
    if len(fitting) > 1:
        raise UserError(
            f"{where} has several folders for split {split!r}: {', '.join(fitting)}. Set split to one of them."
        )
    if fitting:
        if beside := sorted(f for f in folders if split_word(f) is None and f != fitting[0]):
            _say_once(f'Using only the "{fitting[0]}" folder of {where}; ignoring {", ".join(beside)}.')
        return fitting[0]
    splits = sorted(folder for folder in folders if split_word(folder))
    if split == "train" and not splits:
        return ""
    raise no_split(where, split, splits)


def no_split(where: str | Path, split: str, known: Collection[str]) -> UserError:
    """What to say of a split that is not there; `known` are those that are."""
    if known:
        return UserError(f"{where} has no split {split!r}. Choose one of {', '.join(known)}.")
    return UserError(
        f"{where} is not divided into splits, so it has no {split!r}. Divide it by setting split to 80% and test_split "
        "to -20%."
    )


@cache
def _say_once(sentence: str) -> None:
    if is_first():
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


def labels_from_words(words: Sequence[str], chosen: Ints, where: str) -> tuple[Ints | None, list[str] | None]:
    """Labels of the `chosen` ones of all images, by words or numbers ("" for none); one numbering for all of them."""
    ours = [words[i] for i in chosen.tolist()]
    if not any(ours):
        return None, None
    if not all(ours):
        raise UserError(f"Some images of {where} have a label and some do not. Label all of them or none.")
    every = set(words) - {""}
    numbered = all(word.isdecimal() and len(word) < 4000 for word in every)  # Python refuses longer numbers
    classes = sorted(every, key=int) if numbered else sorted(every)
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[word] for word in ours], np.int64), classes
