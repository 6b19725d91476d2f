"""The linear protocols of the literature, as data. A published number belongs to the one it was measured by."""

from dataclasses import dataclass
from typing import Literal

from momentum2.config import DataName, OptimConfig

ProtocolName = Literal["paper", "moco", "simsiam", "byol"]


@dataclass(frozen=True)
class Protocol:
    """How a linear classifier is trained on random crops.

    Args:
        norm: Its outputs are normalized by BN.
        optim: Optimizer, schedule, and the learning rate per 256 images.
        batch_size: Images per step, over all processes.
        epochs: Passes over the training images.
    """

    norm: bool
    optim: OptimConfig
    batch_size: int
    epochs: int


#: None of them has weight decay.
PROTOCOLS: dict[ProtocolName, Protocol] = {
    "paper": Protocol(True, OptimConfig("sgd", 0.2, 0.0), 256, 80),
    "moco": Protocol(False, OptimConfig("sgd", 30.0, 0.0, milestones=[0.6, 0.8]), 256, 100),
    "simsiam": Protocol(False, OptimConfig("lars", 0.1, 0.0), 4096, 90),
    "byol": Protocol(False, OptimConfig("sgd", 0.2, 0.0, nesterov=True), 4096, 80),
}

#: Where the paper's own protocol has another learning rate: STL-10, and other small data sets like it.
_SMALL: frozenset[DataName] = frozenset({"stl10", "cifar10", "cifar100", "shapes"})
_SMALL_LR = 0.5


def default_lr(name: ProtocolName, data: DataName) -> float:
    """The learning rate per 256 images of a protocol on a kind of data."""
    return _SMALL_LR if name == "paper" and data in _SMALL else PROTOCOLS[name].optim.lr


def result_name(name: ProtocolName | Literal["cached"]) -> str:
    """What results by a protocol are called; the paper's is plain `linear`."""
    return "linear" if name == "paper" else f"linear {name}"
