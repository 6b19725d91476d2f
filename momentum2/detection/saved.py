"""A fine-tuned detector in a file, `detector.safetensors`: weights, classes and what it is built of."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from momentum2 import backbones
from momentum2.detection.detector import Detector
from momentum2.detection.models import build_detector
from momentum2.detection.presets import TWO_STAGE, DetectorName, EncoderConfig, HeadConfig
from momentum2.errors import UserError
from momentum2.files import write_whole
from momentum2.runs.names import DETECTOR
from momentum2.weights import Architecture, to_bytes

_CARD = "momentum2-detector"  # key of the file's metadata


@dataclass(frozen=True)
class DetectorCard:
    """What a detector is: enough to build it again, and to name what it finds."""

    model: DetectorName
    encoder: EncoderConfig
    head: HeadConfig
    short_edge: int  # of the images it is shown
    max_long_edge: int
    class_names: Sequence[str]
    category_ids: Sequence[int]

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        parts = {"encoder": EncoderConfig(**values["encoder"]), "head": HeadConfig(**values["head"])}
        return cls(**values | parts)

    def build(self, encoder: backbones.Encoder) -> Detector:
        """The detector on `encoder`, its other weights random."""
        model = build_detector(
            self.model, encoder, len(self.class_names), self.head, self.short_edge, self.max_long_edge
        )
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Detector(model, two_stage=self.model in TWO_STAGE)


def architecture_of(encoder: EncoderConfig) -> Architecture:
    """What is built: the network as it takes images of any size."""
    options = tuple(encoder.options or ())
    return backbones.for_any_size(Architecture(encoder.backbone, encoder.stem, encoder.width, options))


def save_detector(path: Path, detector: Detector, card: DetectorCard) -> None:
    """Write the file, whole or not at all."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in detector.model.state_dict().items()}
    write_whole(path, to_bytes(state, {"format": "pt", _CARD: json.dumps(asdict(card))}))


def load_detector(source: Path) -> tuple[Detector, DetectorCard]:
    """The detector in a run directory or file, in evaluation mode."""
    path = source / DETECTOR if source.is_dir() else source
    if not path.exists():
        raise UserError(
            f"{source} has no fine-tuned detector ({DETECTOR}). Pass a run directory of momentum2 detect."
        )
    try:
        with safe_open(path, "pt") as file:
            card = DetectorCard.from_json((file.metadata() or {})[_CARD])
        state = safetensors.torch.load_file(path)
        detector = card.build(backbones.of(architecture_of(card.encoder)))
        detector.model.load_state_dict(state)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{path} is corrupt or not a detector. Pass a run directory of momentum2 detect."
        ) from None
    return detector.eval(), card
