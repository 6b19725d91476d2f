"""A fine-tuned detector in a file, `detector.safetensors`: weights, classes and what it is built of."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from momentum2 import backbones
from momentum2.detection.detector import Detector
from momentum2.detection.models import build_detector
from momentum2.detection.presets import DetectConfig, DetectorName, EncoderConfig, HeadConfig
from momentum2.errors import SettingError, UserError
from momentum2.files import parse_json, write_whole
from momentum2.runs.names import DETECTOR
from momentum2.settings import flatten, override
from momentum2.weights import Architecture, read_metadata, to_bytes

_CARD = "momentum2-detector"  # key of the file's metadata
_VERSION = 2  # of the tensors' names and of what they compute


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

    def build(self, encoder: backbones.Encoder) -> Detector:
        """The detector on `encoder`, its other weights random."""
        model = build_detector(self.model, encoder, len(self.class_names), self.head)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Detector(model, self.short_edge, self.max_long_edge)


def architecture_of(encoder: EncoderConfig) -> Architecture:
    """What is built: the network as it takes images of any size."""
    options = tuple(encoder.options or ())
    return backbones.for_any_size(Architecture(encoder.backbone, encoder.stem, encoder.width, options))


def save_detector(path: Path, detector: Detector, card: DetectorCard) -> None:
    """Write the file, whole or not at all."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in detector.model.state_dict().items()}
    text = json.dumps({"version": _VERSION, **asdict(card)})
    write_whole(path, to_bytes(state, {"format": "pt", _CARD: text}))


def read_card(source: Path) -> DetectorCard:
    """What the detector in a run directory or file is."""
    path = _path(source)
    with _corrupt(path):
        values = parse_json(read_metadata(path)[_CARD])
        if values.pop("version", 1) != _VERSION:
            raise UserError(f"{path} was written by another version of momentum2. Fine-tune it again.")
        settings = override(
            DetectConfig(),
            {
                "model": values["model"],
                "data.test_short_edge": values["short_edge"],
                "data.max_long_edge": values["max_long_edge"],
                **flatten({"encoder": values["encoder"], "head": values["head"]}),
            },
        )
        names, ids = list(values["class_names"]), list(values["category_ids"])
        if not all(isinstance(name, str) for name in names) or not all(type(i) is int for i in ids):
            raise ValueError("classes are texts with numbers")
        if len(names) != len(ids):
            raise ValueError("each class has one number")
        data = settings.data
        return DetectorCard(
            settings.model,
            settings.encoder,
            settings.head,
            data.test_short_edge,
            data.max_long_edge,
            names,
            ids,
        )


def load_detector(source: Path, card: DetectorCard) -> Detector:
    """The detector of that card in a run directory or file, in evaluation mode."""
    path = _path(source)
    with _corrupt(path):
        state = safetensors.torch.load_file(path)
        detector = card.build(backbones.of(architecture_of(card.encoder)))
        detector.model.load_state_dict(state)
    return detector.eval()


def _path(source: Path) -> Path:
    path = source / DETECTOR if source.is_dir() else source
    if not path.exists():
        raise UserError(
            f"{source} has no fine-tuned detector ({DETECTOR}). Pass a run directory of momentum2 detect."
        )
    return path


@contextmanager
def _corrupt(path: Path) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        SafetensorError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        SettingError,
    ):
        raise UserError(
            f"{path} is corrupt or not a detector. Pass a run directory of momentum2 detect."
        ) from None
