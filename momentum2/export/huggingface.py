"""For the Hugging Face Hub: a folder that timm loads from there, or from the disk."""

from pathlib import Path

from momentum2.export.target import (
    Target,
    preprocessing,
    require_resnet,
    require_usual,
    write_json,
)
from momentum2.runs.encoder import LoadedEncoder, save_encoder


def write(loaded: LoadedEncoder, folder: Path) -> None:
    card = loaded.card
    require_resnet(card, "timm")
    require_usual(card, "timm")
    save_encoder(folder / "model.safetensors", loaded.encoder, loaded.card)
    config = {
        "architecture": card.backbone,
        "num_classes": 0,
        "num_features": card.feature_dim,
        "global_pool": "avg",
        "pretrained_cfg": {
            **preprocessing(card),
            "num_classes": 0,
            "pool_size": [-(-card.image_size // 32)] * 2,
            "first_conv": "conv1",
            "classifier": "fc",
        },
    }
    write_json(folder / "config.json", config)


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    return (
        "import timm\n"
        f'model = timm.create_model("local-dir:{folder.as_posix()}", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
    )


TARGET = Target(write, lines)
