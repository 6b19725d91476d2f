"""What all tools that weights are exported to have in common."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from momentum2.backbones import TIMM, TORCHVISION
from momentum2.errors import UserError
from momentum2.files import write_new
from momentum2.runs.card import EncoderCard
from momentum2.runs.encoder import LoadedEncoder
from momentum2.weights import RESNETS


class Tool(NamedTuple):
    """A tool that weights go to.

    `check` raises a `UserError` that says why the tool cannot have a network; `write` puts the files into an empty
    folder; `lines` are the three lines of Python that load them from there, which import torchvision if
    `uses_torchvision`. `loaded_by_timm` folders are as the Hugging Face Hub has them.
    """

    check: Callable[[EncoderCard], None]
    write: Callable[[LoadedEncoder, Path], None]
    lines: Callable[[LoadedEncoder, Path], str]
    uses_torchvision: bool = False
    loaded_by_timm: bool = False


def preprocessing(card: EncoderCard) -> dict[str, Any]:
    """What is done to an image before the network sees it, in the words of timm's data configs."""
    return {
        "input_size": [card.channels, card.image_size, card.image_size],
        "interpolation": card.interpolation,
        "mean": list(card.mean),
        "std": list(card.std),
        "crop_pct": card.crop,
        "crop_mode": "center",
        **({} if card.window is None else {"window": list(card.window)}),
    }


def write_json(path: Path, content: object) -> None:
    write_new(path, json.dumps(content, indent=2) + "\n")


def write_preprocessing(folder: Path, card: EncoderCard) -> None:
    write_json(folder / "preprocessing.json", preprocessing(card))


def plain(card: EncoderCard) -> str:
    """What torchvision calls the network."""
    return card.backbone.removeprefix(TORCHVISION)


def require_resnet(card: EncoderCard, tool: str) -> None:
    """Refuse what is not a ResNet of torchvision: `tool` has other names for its parts."""
    if plain(card) not in RESNETS and plain(card) != "resnet10":  # of which `require_usual` speaks
        other = "timm" if card.backbone.startswith(TIMM) else "torchvision"
        raise UserError(f"{tool} takes ResNets, not {card.backbone}. Export to {other} or onnx.")


def require_usual(card: EncoderCard, tool: str, any_width: bool = False) -> None:
    """Refuse a network, a stem or a width that `tool` does not build."""
    if plain(card) == "resnet10":
        raise UserError(f"{tool} has no resnet10. Export to onnx, or pretrain with model.backbone resnet18.")
    if card.channels != 3:
        raise UserError(
            f"{tool} takes images of three channels, and this {card.backbone} has {card.channels}. Export to onnx."
        )
    unusual, settings = [], []
    if card.stem != "imagenet":
        unusual, settings = [f"with the 3x3 stem {card.stem}"], ["model.stem imagenet"]
    if card.width != 1 and not any_width:
        unusual, settings = [*unusual, f"of width {card.width:g}"], [*settings, "model.width 1"]
    if unusual:
        raise UserError(
            f"{tool} has no {card.backbone} {' and '.join(unusual)}. Export to onnx, or pretrain with "
            f"{' and '.join(settings)}."
        )
