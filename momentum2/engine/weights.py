"""State dicts in files of others: read without running code, and reduced to one network's own names."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from momentum2 import backbones
from momentum2.config import Stem
from momentum2.errors import UserError

#: Where training scripts keep the state dict inside the object that they save.
_NESTS = ("state_dict", "model", "model_state_dict")
#: What wrappers and training scripts put before the names of a network; the rest of a file is other networks.
_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod|model|network|backbone|encoder|encoder_q|base_encoder)\.)*")
#: Classifiers of torchvision's networks; an encoder has none.
_HEADS = ("fc.", "classifier.")
#: torchvision's ResNets: whether the blocks are bottlenecks, and how many there are in each layer.
_RESNETS = {
    "resnet18": (False, (2, 2, 2, 2)),
    "resnet34": (False, (3, 4, 6, 3)),
    "resnet50": (True, (3, 4, 6, 3)),
    "resnet101": (True, (3, 4, 23, 3)),
    "resnet152": (True, (3, 8, 36, 3)),
    "resnext50_32x4d": (True, (3, 4, 6, 3)),
    "resnext101_32x8d": (True, (3, 4, 23, 3)),
    "resnext101_64x4d": (True, (3, 4, 23, 3)),
    "wide_resnet50_2": (True, (3, 4, 6, 3)),
    "wide_resnet101_2": (True, (3, 4, 23, 3)),
}
_RESNET_NAMES = {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer4.0.conv1.weight"}


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a `.safetensors` file, or in one of `torch.save`, which may hold nothing but data."""
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}).") from None
    except SafetensorError:
        raise UserError(
            f"{path} is damaged or is not a safetensors file; fetch or export it again."
        ) from None
    except Exception:  # torch.load has no error of its own: damage shows as nearly any of Python's
        raise UserError(
            f"{path} is damaged or has more than weights; give a state dict of torch.save or safetensors."
        ) from None
    while isinstance(content, Mapping) and (nest := next((n for n in _NESTS if n in content), None)):
        content = content[nest]
    if not _is_state(content):
        raise UserError(f"{path} has no state dict; give a file that maps names to tensors.")
    return dict(content)


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and len(content) > 0
        and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items())
    )


def networks(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors by the prefix that wrappers put before their names, without it and without a classifier."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        prefix = _WRAPPERS.match(name).group()  # type: ignore[union-attr]  # it matches the empty string
        rest = name.removeprefix(prefix)
        if not rest.startswith(_HEADS):
            found.setdefault(prefix, {})[rest] = tensor
    return found


class Architecture(NamedTuple):
    """The arguments of `backbones.build`."""

    backbone: str
    stem: Stem
    width: float


def identify(
    state: Mapping[str, Tensor], backbone: str | None, stem: Stem | None, width: float | None
) -> tuple[Architecture, dict[str, Tensor]]:
    """The network in a state dict: what it is, and its tensors by the encoder's own names.

    A ResNet is known by its tensors. Another network must be named, and so must the stem of a ResNet whose
    first convolution is 3x3, which stride 1 and 2 have in common. Raises a `UserError` without a subject.
    """
    found = networks(state)
    resnets = [tensors for tensors in found.values() if tensors.keys() >= _RESNET_NAMES]
    if len(resnets) > 1:
        raise UserError("has several networks; give a file with one.")
    if resnets:
        return _identify_resnet(resnets[0], backbone, stem, width)
    if backbone is None:
        raise UserError("is not of a ResNet; name its architecture with backbone.")
    largest = max(found.values(), key=len, default={})
    return Architecture(backbone, stem or "imagenet", width or 1.0), largest


def _identify_resnet(
    tensors: dict[str, Tensor], backbone: str | None, stem: Stem | None, width: float | None
) -> tuple[Architecture, dict[str, Tensor]]:
    channels, _, kernel, _ = tensors["conv1.weight"].shape
    width = width or channels / 64
    if stem is None and kernel == 3:
        raise UserError(
            "has a 3x3 first convolution, whose stride it does not tell; give stem cifar or small."
        )
    stem = stem or "imagenet"
    if backbone:
        return Architecture(backbone, stem, width), tensors
    blocks = tuple(len({n.split(".")[1] for n in tensors if n.startswith(f"layer{i}.")}) for i in range(1, 5))
    kind = ("layer1.0.conv3.weight" in tensors, blocks)
    for name in (name for name, other in _RESNETS.items() if other == kind):
        encoder = backbones.build(name, stem, width)
        if not differences(encoder.state_dict(), tensors):
            return Architecture(name, stem, width), tensors
    raise UserError("is of no ResNet of torchvision; name its architecture with backbone.")


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """What keeps `found` from being a state dict with the names and shapes of `expected`, in words."""
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in expected]
    for name in expected.keys() & found.keys():
        if expected[name].shape != found[name].shape:
            wrong.append(f"{name} is {list(found[name].shape)} instead of {list(expected[name].shape)}")
    return wrong
