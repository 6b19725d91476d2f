"""For torchvision: a state dict that its own network takes strictly, as safetensors and as .pth."""

from pathlib import Path

import torch
from torch import nn

from momentum2.backbones import TIMM
from momentum2.errors import UserError
from momentum2.export.tool import Tool, plain, require_usual, write_preprocessing
from momentum2.runs.card import EncoderCard
from momentum2.runs.encoder import LoadedEncoder, save_encoder

#: Networks whose encoder is not just torchvision's network without its last part.
_OTHERWISE = ("vgg", "googlenet", "inception")


def check(card: EncoderCard) -> None:
    require_usual(card, "torchvision")
    if card.backbone.startswith(TIMM):
        raise UserError(f"torchvision does not have {card.backbone}. Export to timm or onnx.")
    if plain(card).startswith(_OTHERWISE) or card.options:
        raise UserError(
            f"torchvision's {card.backbone} without its classifier gives different features. Export to onnx."
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
    network = f"torchvision.models.{plain(loaded.card)}()"
    return (
        "import torch, torchvision\n"
        f"model = {network}.eval(); model.{_head(loaded)} = torch.nn.Identity()\n"
        f'model.load_state_dict(torch.load("{folder.as_posix()}/model.pth", weights_only=True))\n'
    )


TOOL = Tool(check, write, lines, uses_torchvision=True)
