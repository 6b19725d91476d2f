"""For torchvision: a state dict that its own network takes strictly, as safetensors and as .pth."""

from pathlib import Path

import torch
from torch import nn

from momentum2.backbones import TIMM, TORCHVISION
from momentum2.errors import UserError
from momentum2.export.target import (
    Target,
    require_usual,
    write_preprocessing,
)
from momentum2.runs.encoder import EncoderCard, LoadedEncoder, save_encoder

#: Networks whose encoder is not just torchvision's network without its last part.
_OTHERWISE = ("vgg", "googlenet", "inception")


def check(card: EncoderCard) -> None:
    require_usual(card, "torchvision")
    name = card.backbone.removeprefix(TORCHVISION)
    if card.backbone.startswith(TIMM):
        raise UserError(f"torchvision does not have {card.backbone}. Export to timm or onnx.")
    if name.startswith(_OTHERWISE) or card.options:
        raise UserError(
            f"torchvision's {card.backbone} without its classifier gives other features. Export to onnx."
        )


def write(loaded: LoadedEncoder, folder: Path) -> None:
    save_encoder(folder / "model.safetensors", loaded.encoder, loaded.card)
    torch.save(loaded.encoder.state_dict(), folder / "model.pth")
    write_preprocessing(folder, loaded.card)


def _head(loaded: LoadedEncoder) -> str:
    """What torchvision calls the classifier, or the part of it that the encoder does not have."""
    name = next((name for name in ("fc", "head", "heads") if hasattr(loaded.encoder, name)), "classifier")
    whole = not isinstance(getattr(loaded.encoder, name), nn.Sequential)
    return name if whole else f"{name}[-1]"


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    head, name = _head(loaded), loaded.card.backbone.removeprefix(TORCHVISION)
    return (
        "import torch, torchvision\n"
        f"model = torchvision.models.{name}().eval(); model.{head} = torch.nn.Identity()\n"
        f'model.load_state_dict(torch.load("{folder.as_posix()}/model.pth", weights_only=True))\n'
    )


TARGET = Target(check, write, lines, uses_torchvision=True)
