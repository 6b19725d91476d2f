"""An encoder, written to a file or ready in memory, from any source that has one."""

import copy
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from momentum2 import backbones
from momentum2.config import OWN, Network, Stem
from momentum2.errors import SettingError, UserError
from momentum2.files import write_whole
from momentum2.runs.card import EncoderCard, architecture_of, read_card
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
    read_state,
    to_bytes,
)

log = logging.getLogger("momentum2")


#: Where the methods of version 0.1 kept their encoders; later checkpoints say it themselves.
_OLD_PLACES: tuple[tuple[Network, str], ...] = (
    ("teacher", "teacher.network.encoder"),
    ("student", "student.encoder"),
    ("student", "f.encoder"),
    ("student", "encoder"),
)


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
    try:
        write_whole(path, to_bytes(state, card.to_metadata() | {SHA256: checksum(state)}))
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
        stem: Stem of a state dict; needed if it is 3x3.
        width: Width of a state dict; found from its tensors.
        encoder: Your own network, like the one that the run was started with; the weights are loaded into a copy of it.
    """
    path = Path(source)
    with torch.random.fork_rng(devices=[]):  # a new network draws weights, which the file's replace
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
