"""For timm and for the Hugging Face Hub: the folder that timm itself writes, which transformers reads too."""

from pathlib import Path
from typing import Any

from torch import nn

from momentum2.backbones import TIMM, options_of, timm_networks
from momentum2.export.tool import Tool, plain, preprocessing, require_resnet, require_usual
from momentum2.runs.card import EncoderCard
from momentum2.runs.encoder import LoadedEncoder, save_encoder


def check(card: EncoderCard) -> None:
    if not card.backbone.startswith(TIMM):
        require_resnet(card, "timm")
        require_usual(card, "timm")


def write(loaded: LoadedEncoder, folder: Path) -> None:
    card = loaded.card
    model: Any = _timms(loaded)
    # Not public: the tests load what it writes in a process of their own.
    from timm.models._hub import save_for_hf

    model.pretrained_cfg = {
        **model.pretrained_cfg,
        **preprocessing(card),
        "num_classes": 0,
        "tag": "momentum2",
        "test_input_size": None,
        "test_crop_pct": None,
        "license": None,  # of other weights; the card has that of these
    }
    options = options_of(card.options)
    if card.channels != 3:
        options["in_chans"] = card.channels
        # Or timm would take these weights for those of three channels.
        model.pretrained_cfg["first_conv"] = None
    save_for_hf(
        model,
        str(folder),
        model_config={"num_classes": 0, "num_features": card.feature_dim},
        model_args=options or None,
        safe_serialization=True,
    )
    save_encoder(folder / "model.safetensors", model, card)  # the same tensors, with our card


def _timms(loaded: LoadedEncoder) -> nn.Module:
    """timm's own module with the encoder's weights."""
    timm, card = timm_networks.timm(), loaded.card
    if card.backbone.startswith(TIMM):
        return loaded.encoder
    # Its ResNets have torchvision's names.
    model: nn.Module = timm.create_model(plain(card), num_classes=0, in_chans=card.channels)
    model.load_state_dict(loaded.encoder.state_dict())
    return model.eval()


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    return (
        "import timm\n"
        f'model = timm.create_model("local-dir:{folder.as_posix()}", pretrained=True).eval()\n'
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
    )


TOOL = Tool(check, write, lines, uses_torchvision=True, loaded_by_timm=True)
