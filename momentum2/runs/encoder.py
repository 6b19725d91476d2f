"""The product of a run: one encoder, with all that is needed to use it, in a file or ready in memory."""

import copy
import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

from safetensors import SafetensorError
from torch import Tensor, nn

from momentum2 import __version__, backbones
from momentum2.augment import Normalization, ViewSpec, view_specs
from momentum2.config import OWN, Config, DataConfig, ModelConfig, Network, Stem, ViewsConfig
from momentum2.data.images import Reading
from momentum2.data.looking import reading_of
from momentum2.errors import SettingError, UserError
from momentum2.files import parse_json, write_whole
from momentum2.runs.checkpoint import Checkpoints, Damaged, parse_state, parse_tensors, read_files
from momentum2.runs.names import CHECKPOINTS, CONFIG, ENCODER, STEP
from momentum2.runs.preprocess import Preprocess
from momentum2.settings import config_from_file
from momentum2.weights import (
    SHA256,
    Architecture,
    checksum,
    fill,
    identify,
    network_in,
    on_cpu,
    read_metadata,
    read_state,
    to_bytes,
)

log = logging.getLogger("momentum2")


#: Keys of the file's metadata; files of version 0.1 lack the last.
_CARD, _CARD_SHA256 = "momentum2", "card_sha256"
LARGEST_IMAGE = 16_384  # pixels of a side
MOST_CHANNELS = 1_000
#: Where the methods of version 0.1 kept their encoders; later checkpoints say it themselves.
_OLD_PLACES: tuple[tuple[Network, str], ...] = (
    ("teacher", "teacher.network.encoder"),
    ("student", "student.encoder"),
    ("student", "f.encoder"),
    ("student", "encoder"),
)


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
        return {"format": "pt", _CARD: json.dumps(asdict(self))}

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
            raise ValueError("the card has values of other kinds")
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


class LoadedEncoder(nn.Module):
    """An encoder in evaluation mode: (n, channels, S, S), as `preprocess` makes them, to (n, feature_dim) features.

    `encoder` is the network itself, whose state dict has the names of torchvision or timm without the classifier.
    """

    def __init__(self, encoder: nn.Module, card: EncoderCard) -> None:
        super().__init__()
        self.encoder = encoder
        self.card = card
        self.feature_dim = card.feature_dim
        self.preprocess = Preprocess(card.view, card.reading)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


def save_encoder(path: Path, encoder: nn.Module, card: EncoderCard) -> None:
    """Write an `encoder.safetensors`, whole or not at all: plain BN names, card and checksum as metadata."""
    state = on_cpu(encoder.state_dict())
    metadata = card.to_metadata() | {SHA256: checksum(state)}
    metadata[_CARD_SHA256] = hashlib.sha256(metadata[_CARD].encode()).hexdigest()
    try:
        write_whole(path, to_bytes(state, metadata))
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}).") from None


def load_encoder(
    source: str | os.PathLike[str],
    network: Network | None = None,
    backbone: str | None = None,
    stem: Stem | None = None,
    width: float | None = None,
    encoder: nn.Module | None = None,
) -> LoadedEncoder:
    """An encoder, ready to use, from any source that has one.

    Args:
        source: A run directory, one of its checkpoints, an `encoder.safetensors`, or a state dict with the
            names of torchvision and timm (`.safetensors`, or `.pth` with nothing but tensors).
        network: teacher or student; by default the one that the run exports.
        backbone: Architecture of a state dict; that of a ResNet is found from its tensors.
        stem: Stem of a state dict; needed where it is 3x3.
        width: Width of a state dict; found from its tensors.
        encoder: Your own network, such as the run was started with; the weights go into a copy of it.
    """
    path = Path(source)
    if path.is_dir():
        loaded = _from_directory(path, network, encoder)
    elif not path.exists():
        raise UserError(f"There is no run directory or file of weights called {path}.")
    elif card := read_card(path):
        loaded = _from_own_file(path, card, network, encoder)
    else:
        loaded = _from_foreign_file(path, backbone, stem, width)
    for what, wanted in (("backbone", backbone), ("stem", stem), ("width", width)):
        found = getattr(loaded.card, what)
        if wanted is not None and wanted != found:
            raise UserError(f"{path} has {what} {found}, not {wanted}.")
    return loaded


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


def _from_own_file(
    path: Path, card: EncoderCard, network: Network | None, given: nn.Module | None
) -> LoadedEncoder:
    if network not in (None, card.network):
        raise UserError(
            f"{path} contains the {card.network}, not the {network}. Pass the run directory instead."
        )
    encoder = _encoder(path, card.architecture, read_state(path), given, card.image_size)
    return LoadedEncoder(encoder, card)


def _from_foreign_file(
    path: Path, backbone: str | None, stem: Stem | None, width: float | None
) -> LoadedEncoder:
    state = read_state(path)
    architecture = identify(network_in(state, ["conv1.weight"], path), path, backbone, stem, width)
    encoder = backbones.of(architecture)
    fill(encoder, network_in(state, encoder.state_dict(), path), path)
    return LoadedEncoder(encoder, EncoderCard.of_foreign(architecture, encoder.feature_dim))


def _from_directory(path: Path, network: Network | None, given: nn.Module | None) -> LoadedEncoder:
    if (path / CONFIG).exists():
        card = read_card(path / ENCODER) if (path / ENCODER).exists() else None
        if card and network in (None, card.network):
            return _from_own_file(path / ENCODER, card, network, given)
        return _from_newest_checkpoint(path, network, given)
    if (path.parent.parent / CONFIG).exists() and path.name.startswith(STEP):
        try:
            return _from_checkpoint(path, network, given)
        except Damaged as damage:
            raise UserError(f"{path} is corrupt ({damage}). Choose another checkpoint of the run.") from None
    raise UserError(f"{path} is not a run directory or a checkpoint.")


def _from_newest_checkpoint(run: Path, network: Network | None, given: nn.Module | None) -> LoadedEncoder:
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1, config_hash="")
    for step in reversed(checkpoints.steps()):
        try:
            return _from_checkpoint(checkpoints.path(step), network, given)
        except Damaged as damage:
            log.warning(
                "%s is corrupt (%s). Using the previous checkpoint instead.", checkpoints.path(step), damage
            )
    raise UserError(f"{run} has no {ENCODER} and no intact checkpoint yet.")


def _from_checkpoint(path: Path, network: Network | None, given: nn.Module | None) -> LoadedEncoder:
    """The encoder in a checkpoint, with device 0's statistics where each device has its own."""
    files = read_files(path)
    state, (tensors, _) = parse_state(files[0]), parse_tensors(files)
    config = config_from_file(path.parent.parent / CONFIG)
    exported = config.method.export or "teacher"
    places = state["info"].get("encoders", {}).items() or _OLD_PLACES
    for name, place in sorted(places, key=lambda found: found[0] != exported):
        full = f"method/{place}."
        found = {key.removeprefix(full): t for key, t in tensors.items() if key.startswith(full)}
        if found and network in (None, name):
            encoder = _encoder(path, architecture_of(config), found, given, config.data.image_size)
            start = state["info"].get("weights")
            card = EncoderCard.of_run(config, encoder.feature_dim, name, state["step"], start)
            return LoadedEncoder(encoder, card)
    raise SettingError(
        "network", f"cannot be {network} for {path}: method {config.method.name} has none. Leave it out."
    )


def _encoder(
    path: Path,
    architecture: Architecture,
    state: Mapping[str, Tensor],
    given: nn.Module | None,
    image_size: int,
) -> backbones.Encoder:
    if given is not None:
        encoder = backbones.with_feature_dim(copy.deepcopy(given), image_size, architecture.channels)
    elif architecture.backbone == OWN:
        raise UserError(
            f"{path} contains the weights of a custom network, which can only be passed from Python: "
            f"load_encoder({str(path)!r}, encoder=...)."
        )
    else:
        encoder = backbones.of(architecture)
    fill(encoder, state, path)
    return encoder
