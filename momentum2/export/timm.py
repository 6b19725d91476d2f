"""For timm: its ResNets have torchvision's names, so the map is the identity."""

from pathlib import Path

from momentum2.export.target import (
    Target,
    preprocessing,
    require_resnet,
    require_usual,
    write_preprocessing,
)
from momentum2.runs.encoder import LoadedEncoder, save_encoder


def write(loaded: LoadedEncoder, folder: Path) -> None:
    require_resnet(loaded.card, "timm")
    require_usual(loaded.card, "timm")
    save_encoder(folder / "model.safetensors", loaded.encoder, loaded.card)
    write_preprocessing(folder, loaded.card)


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    name, file = loaded.card.backbone, f"{folder.as_posix()}/model.safetensors"
    options = ", ".join(f"{key}={value!r}" for key, value in preprocessing(loaded.card).items())
    return (
        "import timm\n"
        f'model = timm.create_model("{name}", num_classes=0, checkpoint_path="{file}").eval()\n'
        f"transform = timm.data.create_transform({options})\n"
    )


TARGET = Target(write, lines)
