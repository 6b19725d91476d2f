"""What the encoder of a run is: its architecture, what it wants to see and where it comes from."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from safetensors import SafetensorError
from torch import nn

from momentum2 import __version__, backbones
from momentum2.augment import Normalization, ViewSpec, view_specs
from momentum2.config import OWN, Config, DataConfig, ModelConfig, Network, Stem, ViewsConfig
from momentum2.data.images import Reading
from momentum2.data.looking import reading_of
from momentum2.errors import UserError
from momentum2.files import parse_json
from momentum2.weights import Architecture, read_metadata

#: Keys of the file's metadata; files of version 0.1 lack the last.
_CARD, _CARD_SHA256 = "momentum2", "card_sha256"
LARGEST_IMAGE = 16_384  # pixels of a side
MOST_CHANNELS = 1_000


@dataclass(frozen=True)
class EncoderCard:
    """What an encoder is, what it wants to see and where it comes from.

    `crop` is the side of the central square that is shown to it, as a share of an image's shorter side.
    `options` are arguments of the network's constructor. `start` names the weights that its training began with, if
    they were not random, with their SHA-256 and license. `network`, `method`, `step` and `data` are None where they are
    unknown, as in files from elsewhere. `window` is what images of more than 8 bits were read with.
    """

    backbone: str
    stem: Stem
    width: float
    feature_dim: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop: float
    options: tuple[str, ...] = ()
    channels: int = 3
    start: dict[str, str] | None = None
    interpolation: Literal["bilinear"] = "bilinear"
    network: Network | None = None
    method: str | None = None
    step: int | None = None
    data: str | None = None
    version: str = __version__
    window: tuple[float, ...] | None = None

    @classmethod
    def of_run(
        cls,
        config: Config,
        feature_dim: int,
        network: Network,
        step: int,
        start: Mapping[str, str] | None = None,
    ) -> Self:
        """The card of an encoder that was trained with `config` for `step` steps from `start`."""
        data = config.data
        return replace(
            cls.of_foreign(architecture_of(config), feature_dim, data.image_size, Normalization.of(data)),
            start=None if start is None else dict(start),
            network=network,
            method=config.method.name,
            step=step,
            data=data.name,
            window=reading_of(data).window,
        )

    @classmethod
    def of_foreign(
        cls,
        architecture: Architecture,
        feature_dim: int,
        image_size: int = 224,
        normalization: Normalization | None = None,
    ) -> Self:
        """The card of an encoder of which only the architecture is known."""
        normalization = normalization or Normalization.of(DataConfig(channels=architecture.channels))
        view = view_specs(ViewsConfig(recipe="evaluation"), image_size, normalization)[0]
        assert view.center is not None
        name, stem, width, options, channels = architecture
        means = view.mean, view.std
        return cls(name, stem, width, feature_dim, image_size, *means, view.center, options, channels)

    @property
    def architecture(self) -> Architecture:
        return Architecture(self.backbone, self.stem, self.width, self.options, self.channels)

    @property
    def view(self) -> ViewSpec:
        """What is done to an image before the encoder sees it."""
        return ViewSpec(self.image_size, center=self.crop, flip_p=0.0, mean=self.mean, std=self.std)

    @property
    def reading(self) -> Reading:
        """How the values of an image become pixels."""
        return Reading(self.channels, self.window)

    def as_seen(self, data: DataConfig) -> DataConfig:
        """`data` with its images read and normalized as the encoder has to see them."""
        usual = Normalization.of(DataConfig(channels=self.channels))
        return replace(
            data,
            channels=self.channels,
            window=None if self.window is None else list(self.window),
            mean=None if self.mean == usual.mean else list(self.mean),
            std=None if self.std == usual.std else list(self.std),
        )

    def to_metadata(self) -> dict[str, str]:
        text = json.dumps(asdict(self))
        return {"format": "pt", _CARD: text, _CARD_SHA256: hashlib.sha256(text.encode()).hexdigest()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> Self:
        values = parse_json(metadata[_CARD])
        if not isinstance(values, dict):
            raise ValueError("the card is not a table")
        kinds = {"backbone": str, "stem": str, "feature_dim": int, "image_size": int}
        window = values.get("window") or ()
        numbers = [values["width"], values["crop"], *values["mean"], *values["std"], *window]
        options, channels, start = values.get("options", []), values.get("channels", 3), values.get("start")
        start = {} if start is None else start
        if (
            not isinstance(options, list)
            or not isinstance(start, dict)
            or not all(isinstance(text, str) for text in (*options, *start.values()))
            or any(type(values[name]) is not kind for name, kind in kinds.items())
            or not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
            or type(channels) is not int
        ):
            raise ValueError("the card has values of wrong types")
        if (
            not 0 < values["width"] <= 100
            or not 0 < values["image_size"] <= LARGEST_IMAGE
            or not 0 < values["crop"] <= 1
            or not 0 < channels <= MOST_CHANNELS
            or len(values["mean"]) != len(values["std"])
            or min(values["std"]) <= 0
            or len(values.get("window") or (0, 1)) not in (2, 2 * len(values["mean"]))
        ):
            raise ValueError("the card has values out of range")
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)


def inspect(config: Config, given: nn.Module | None = None) -> backbones.Facts:
    """What the encoder of a run is, or one sentence why it cannot be; `given` where Python gave one."""
    model, channels = config.model, config.data.channels
    sizes = tuple(dict.fromkeys(spec.size for spec in view_specs(config.views, config.data.image_size)))
    if given is not None:
        return backbones.inspect_given(given, sizes, channels, OWN)
    options = tuple(model.options or ())
    return backbones.inspect(Architecture(model.backbone, model.stem, model.width, options, channels), sizes)


def architecture_of(config: Config) -> Architecture:
    """What the encoder of a run is built with."""
    if config.model.backbone == OWN:
        return Architecture(OWN, config.model.stem, config.model.width, (), config.data.channels)
    return inspect(config).architecture


def resolved_model(config: Config) -> ModelConfig:
    """The model of a run with all that it is built with."""
    return replace(config.model, options=list(architecture_of(config).options) or None)


def read_card(path: Path) -> EncoderCard | None:
    """The card in an `encoder.safetensors`; None in other files."""
    if path.suffix != ".safetensors":
        return None
    try:
        metadata = read_metadata(path)
        if _CARD not in metadata:
            return None
        digest = hashlib.sha256(metadata[_CARD].encode()).hexdigest()
        if metadata.get(_CARD_SHA256, digest) != digest:
            raise UserError(f"{path} is corrupt: its card is not the one that was written. Copy it again.")
        return EncoderCard.from_metadata(metadata)
    except (OSError, SafetensorError):
        raise UserError(
            f"{path} is corrupt or is not a safetensors file. Download or export it again."
        ) from None
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path} was written by another version of momentum2. Use that version.") from None
