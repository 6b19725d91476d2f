"""Objects that a run was given from Python, by identity: class and digest, in words. Nothing is imported by them."""

import hashlib
import inspect
from collections.abc import Iterable

import numpy as np
from torch import nn

from momentum2.data import Dataset

_STAMPS = 256  # how many images are looked at, if there are more


def of_class(kind: type) -> str:
    """A class and its source; of a class without source, such as one typed into a console, its name alone."""
    try:
        return _words(kind, [inspect.getsource(kind)])
    except (OSError, TypeError):
        return f"{_name(kind)} (source unknown)"


def of_network(network: nn.Module) -> str:
    """A network's class and the names and shapes of its tensors, whatever they hold."""
    return _words(type(network), (f"{name} {tuple(t.shape)}" for name, t in network.state_dict().items()))


def of_dataset(dataset: Dataset) -> str:
    """A data set's class, its length and the stamps of some images."""
    n = len(dataset)
    looked_at = np.unique(np.linspace(0, max(n - 1, 0), min(n, _STAMPS)).astype(int))
    return _words(type(dataset), [str(n), *(dataset.stamp(int(i)) for i in looked_at)])


def _words(kind: type, parts: Iterable[str]) -> str:
    digest = hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
    return f"{_name(kind)} {digest[:16]}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
