"""State dicts in files, ours and those of others: read safely, recognized, and loaded strictly by name."""

import errno
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from momentum2.config import Stem
from momentum2.errors import UserError

SHA256 = "sha256"  # key of the metadata of our own files: of what `checksum` is
#: Where training scripts keep the state dict inside the object that they save.
_NESTS = ("state_dict", "model", "model_state_dict")
#: What wrappers and training scripts put before a network's names.
_WRAPPERS = re.compile(
    r"((?:(?:module|_orig_mod|model|backbone|encoder|encoder_q|base_encoder)\.)*)(.*)", re.DOTALL
)
#: What torchvision's networks have and an encoder does not: classifiers, also those of Inception's training.
_LEFT_OUT = ("fc.", "classifier.", "aux1.", "aux2.", "AuxLogits.")


class Architecture(NamedTuple):
    """What `backbones.of` builds: name, stem and width, arguments of the constructor (NAME=VALUE), input channels."""

    backbone: str
    stem: Stem
    width: float
    options: tuple[str, ...] = ()
    channels: int = 3


class ResNet(NamedTuple):
    """What tells torchvision's ResNets apart."""

    bottleneck: bool
    blocks: tuple[int, int, int, int]
    groups: int = 1
    width_per_group: int = 64


RESNETS = {
    "resnet18": ResNet(False, (2, 2, 2, 2)),
    "resnet34": ResNet(False, (3, 4, 6, 3)),
    "resnet50": ResNet(True, (3, 4, 6, 3)),
    "resnet101": ResNet(True, (3, 4, 23, 3)),
    "resnet152": ResNet(True, (3, 8, 36, 3)),
    "resnext50_32x4d": ResNet(True, (3, 4, 6, 3), 32, 4),
    "resnext101_32x8d": ResNet(True, (3, 4, 23, 3), 32, 8),
    "resnext101_64x4d": ResNet(True, (3, 4, 23, 3), 64, 4),
    "wide_resnet50_2": ResNet(True, (3, 4, 6, 3), 1, 128),
    "wide_resnet101_2": ResNet(True, (3, 4, 23, 3), 1, 128),
}


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a file of safetensors or of `torch.save`, which is read without running any code."""
    if not path.is_file():
        raise UserError(f"There is no weights file {path}.")
    expected = None
    try:
        if path.suffix == ".safetensors":
            content: Any = safetensors.torch.load_file(path)
            expected = read_metadata(path).get(SHA256)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # there is no end to what torch.load raises for corrupt files
        raise UserError(
            f"{path} is not a readable state dict of tensors (.safetensors, or .pth from torch.save)."
        ) from error
    for _ in _NESTS:  # an object may hold itself
        nest = next((n for n in _NESTS if n in content), None) if isinstance(content, dict) else None
        content = content if nest is None else content[nest]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise UserError(f"{path} has no state dict. Save the network's state_dict() itself.")
    if expected is not None and checksum(content) != expected:
        raise UserError(f"{path} is corrupt: its tensors are not those that were written. Copy it again.")
    return content


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; an `OSError` or `SafetensorError` if it is none."""
    if not path.is_file():  # a pipe would be waited for
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def checksum(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and contents; safetensors itself does not notice a flipped bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: on the CPU, contiguous, and none in the memory of another (tied weights)."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        mine = tensor.detach().cpu().contiguous()
        place = mine.untyped_storage().data_ptr()
        found[name] = mine.clone() if place in seen and mine.numel() else mine
        seen.add(place)
    return found


#: The names of dtypes in a .safetensors file.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def safetensors_parts(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The content of a .safetensors file with these tensors of the CPU, in parts.

    safetensors' own `save` keeps the other threads of Python from running until all is done, which takes seconds.
    Like there, wide types come first, so that all are aligned; names are in their order: equal tensors and metadata,
    equal bytes. (The library writes metadata in an order that changes from process to process.)
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    yield len(words).to_bytes(8, "little") + words
    for _, tensor in ordered:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        yield memoryview(flat.numpy())  # type: ignore[arg-type]


def to_bytes(state: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """A safetensors file."""
    return b"".join(safetensors_parts(state, metadata))


def network_in(state: Mapping[str, Tensor], names: Collection[str], path: Path) -> dict[str, Tensor]:
    """The one network in `state` that has some of `names`, without wrappers' prefixes and classifier.

    Other networks in the file, such as projectors, are left out.
    """
    networks: dict[str, dict[str, Tensor]] = {}
    for full, tensor in state.items():
        prefix, name = _WRAPPERS.fullmatch(full).groups()  # type: ignore[union-attr]  # it matches everything
        if not name.startswith(_LEFT_OUT):
            networks.setdefault(prefix, {})[name] = tensor
    found = [prefix for prefix, network in networks.items() if not network.keys().isdisjoint(names)]
    if len(found) > 1:
        raise UserError(f"{path} has several networks ({', '.join(found)}). Save the one that you want.")
    return networks[found[0]] if found else dict(state)


def identify(
    network: Mapping[str, Tensor], path: Path, backbone: str | None, stem: Stem | None, width: float | None
) -> Architecture:
    """What a network is, as far as the caller does not say and its tensors show it.

    A ResNet shows everything but the stride of a 3x3 stem; other networks must be named.
    """
    conv1 = network.get("conv1.weight")
    if conv1 is None or conv1.dim() != 4 or "layer1.0.conv2.weight" not in network:
        if backbone is None:
            raise UserError(f"{path} does not contain a ResNet. Set backbone to the one that it contains.")
        return Architecture(backbone, stem or "imagenet", width or 1.0)
    if stem is None and conv1.shape[2] == 3:
        raise UserError(f"{path} has a 3x3 stem of unknown stride. Set stem to cifar or small.")
    return Architecture(backbone or _resnet(network, path), stem or "imagenet", width or len(conv1) / 64)


def _resnet(network: Mapping[str, Tensor], path: Path) -> str:
    channels = len(network["conv1.weight"])
    blocks = tuple(len({n.split(".")[1] for n in network if n.startswith(f"layer{i}.")}) for i in range(1, 5))
    for name, kind in RESNETS.items():
        inner = channels * kind.width_per_group // 64
        if (
            kind.bottleneck == ("layer1.0.conv3.weight" in network)
            and kind.blocks == blocks
            and network["layer1.0.conv2.weight"].shape[:2] == (inner * kind.groups, inner)
        ):
            return name
    raise UserError(
        f"{path} does not contain a ResNet of torchvision. Set backbone to the one that it contains."
    )


def fill(encoder: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load `state` into the encoder, strictly by name and shape.

    BN's `num_batches_tracked` may be missing, as it is in older files.
    """
    own = encoder.state_dict()
    problems = {
        "missing": [k for k in own.keys() - state.keys() if not k.endswith("num_batches_tracked")],
        "unknown": state.keys() - own.keys(),
        "of a different shape": [k for k in own.keys() & state.keys() if own[k].shape != state[k].shape],
    }
    found = [f"{len(names)} {what} ({_some(names)})" for what, names in problems.items() if names]
    if found:
        raise UserError(f"The weights in {path} do not fit this backbone: {', '.join(found)}.")
    with torch.no_grad():
        for name, tensor in state.items():  # load_state_dict would want versions that files do not have
            own[name].copy_(tensor)


def _some(names: Collection[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:5]) + (", ..." if len(first) > 5 else "")
