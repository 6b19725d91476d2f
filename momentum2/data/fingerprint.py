"""What tells one set of images from another, wherever it lies: for a run that is to be resumed on the same ones."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from momentum2.data.cache import Packed
from momentum2.data.dataset import Dataset, digest_of
from momentum2.data.images import BadImage, Encoded
from momentum2.data.looking import some

Fingerprint = dict[str, Any]


def fingerprint(dataset: Dataset) -> Fingerprint:
    """The names of all images, and size and content of 64 of them; no time and no place, so a copy has the same.

    It is plain data: `names` is a digest, `contents` are digests of images by index (None for one that cannot be read).
    """
    source = dataset.source if isinstance(dataset, Packed) else dataset
    return {
        "names": digest_of(source.names),
        "contents": {str(index): _content(source, index) for index in some(source)},
    }


def difference(before: Mapping[str, Any], now: Fingerprint, names: Sequence[str]) -> str | None:
    """What is different about the images, in words; None if nothing is."""
    if before["names"] != now["names"]:
        return "they have different names or a different order"
    for index, content in before["contents"].items():
        found = now["contents"].get(index)
        if content is not None and found is not None and content != found:  # what cannot be read may heal
            return f"{names[int(index)]} has different content"
    return None


def _content(dataset: Dataset, index: int) -> str | None:
    try:
        picture = dataset.picture(index)
        data = picture.data if isinstance(picture, Encoded) else picture.pixels().tobytes()
    except BadImage:
        return None
    return hashlib.sha256(len(data).to_bytes(8, "big") + data).hexdigest()[:16]
