"""For detectron2: its names for a ResNet, in the pickle of arrays that it reads, and settings that fit."""

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from momentum2.backbones import TORCHVISION
from momentum2.export.target import Target, require_resnet, require_usual
from momentum2.files import write_new
from momentum2.runs.encoder import EncoderCard, LoadedEncoder
from momentum2.weights import RESNETS

_NAMES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^(conv1|bn1)\.", r"stem.\1."),
    (r"^layer(\d)\.", lambda match: f"res{int(match[1]) + 1}."),
    (r"\.downsample\.0\.", ".shortcut."),
    (r"\.downsample\.1\.", ".shortcut.norm."),
    (r"\.bn(\d)\.", r".conv\1.norm."),
)


def renamed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A ResNet's tensors by the names of detectron2's backbone, whose norms do not count batches."""
    result = {}
    for name, tensor in state.items():
        if not name.endswith(".num_batches_tracked"):
            new = name
            for pattern, replacement in _NAMES:
                new = re.sub(pattern, replacement, new)
            result[new] = tensor
    return result


def settings(card: EncoderCard) -> dict[str, Any]:
    """What these weights decide in detectron2's config."""
    kind = RESNETS[card.backbone.removeprefix(TORCHVISION)]
    return {
        "MODEL": {
            "PIXEL_MEAN": [round(255 * value, 3) for value in card.mean],
            "PIXEL_STD": [round(255 * value, 3) for value in card.std],
            "RESNETS": {
                "DEPTH": 2 + sum(kind.blocks) * (3 if kind.bottleneck else 2),
                "NUM_GROUPS": kind.groups,
                "WIDTH_PER_GROUP": int(kind.width_per_group * card.width),
                "STEM_OUT_CHANNELS": int(64 * card.width),
                "RES2_OUT_CHANNELS": int((256 if kind.bottleneck else 64) * card.width),
                "STRIDE_IN_1X1": False,
            },
        },
        "INPUT": {"FORMAT": "RGB"},
    }


def write(loaded: LoadedEncoder, folder: Path) -> None:
    card = loaded.card
    require_resnet(card, "detectron2")
    # Of bottlenecks it can be told the channels.
    require_usual(card, "detectron2", any_width=RESNETS[card.backbone.removeprefix(TORCHVISION)].bottleneck)
    arrays = {name: tensor.numpy() for name, tensor in renamed(loaded.encoder.state_dict()).items()}
    content = {"model": arrays, "__author__": "momentum2", "matching_heuristics": True}
    write_new(folder / "model.pkl", pickle.dumps(content))
    write_new(folder / "detectron2.yaml", yaml.safe_dump(settings(card), sort_keys=False))


def lines(loaded: LoadedEncoder, folder: Path) -> str:
    path = folder.as_posix()
    return (
        "from detectron2 import model_zoo\n"
        'cfg = model_zoo.get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml")\n'
        f'cfg.merge_from_file("{path}/detectron2.yaml"); cfg.MODEL.WEIGHTS = "{path}/model.pkl"\n'
    )


TARGET = Target(write, lines)
