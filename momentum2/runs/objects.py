"""Objects that a run was given from Python, by identity: class and digest, in words. Nothing is imported by them."""

import hashlib
import inspect
import logging
from collections.abc import Iterable

import numpy as np
from torch import nn

from momentum2.data import Dataset

log = logging.getLogger("momentum2")

#: Whose classes are known by their versions.
_OTHERS = frozenset({"momentum2", "torch", "abc", "builtins", "typing"})
_STAMPS = 256  # how many images are looked at, if there are more


def of_class(kind: type) -> str:
    """A class and its source, with that of the classes of yours that it is made from.

    Of a class without source, such as one typed into a console, its name alone.
    """
    bases = [base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] not in _OTHERS]
    try:
        return _words(kind, map(inspect.getsource, [kind, *bases]))
    except (OSError, TypeError):
        log.warning(
            "The source code of %s is not available, so a resumed run cannot notice changes.", _name(kind)
        )
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
