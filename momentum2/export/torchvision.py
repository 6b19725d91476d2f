"""For torchvision: a state dict that its own network takes strictly, as safetensors and as .pth."""

from pathlib import Path

import torch

from momentum2.errors import UserError
from momentum2.export.target import (
    Target,
    require_usual,
    write_preprocessing,
)
from momentum2.runs.encoder import LoadedEncoder, save_encoder

#: Networks whose encoder is not just torchvision's network without its last part.
_OTHERWISE = ("vgg", "googlenet", "inception")


def write(loaded: LoadedEncoder, folder: Path) -> None:
    card = loaded.card
    require_usual(card, "torchvision")
    if card.backbone.startswith(_OTHERWISE):
        raise UserError(
            f"torchvision's {card.backbone} without its classifier gives other features. Export to onnx."
        )
    save_encoder(folder / "model.safetensors", loaded.encoder, loaded.card)
    torch.save(loaded.encoder.state_dict(), folder / "model.pth")
    write_preprocessing(folder, card)


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    head = "fc" if hasattr(loaded.encoder, "fc") else "classifier"
    return (
        "import torch, torchvision\n"
        f"model = torchvision.models.{loaded.card.backbone}().eval(); model.{head} = torch.nn.Identity()\n"
        f'model.load_state_dict(torch.load("{folder.as_posix()}/model.pth", weights_only=True))\n'
    )


TARGET = Target(write, lines)
