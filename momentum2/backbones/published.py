"""Weights that timm has published: fetched from the Hugging Face Hub only when asked for, and only safetensors."""

import hashlib
import logging
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from momentum2.backbones import TIMM, fit, options_of, timm_networks
from momentum2.errors import SettingError, UserError
from momentum2.weights import Architecture, network_in, read_state

FILE = "model.safetensors"  # what the Hub calls them, in every repository of timm

log = logging.getLogger("momentum2")


class Published(NamedTuple):
    """Published weights on this disk.

    Args:
        repository: Where on the Hugging Face Hub they are from.
        license: As timm has it; nobody has judged it.
        file: In the Hub's own cache.
    """

    repository: str
    license: str
    file: Path


def describe(name: str) -> tuple[str, str]:
    """The repository of a network's published weights, and their license; one sentence where there are none."""
    if not name.startswith(TIMM):
        raise SettingError(
            "model.pretrained",
            f"is only for timm networks, not {name}. Choose one such as timm/resnet50, or set model.weights to a file.",
        )
    config = timm_networks.timm().get_pretrained_cfg(name.removeprefix(TIMM))
    if config is None or not config.hf_hub_id:
        raise SettingError("model.pretrained", f"cannot be true: there are no published weights for {name}.")
    return str(config.hf_hub_id), str(config.license or "unknown")


def cached(name: str) -> Published | None:
    """The published weights of a network, if they are on this disk; asks nobody."""
    from huggingface_hub import try_to_load_from_cache

    repository, license = describe(name)
    found = try_to_load_from_cache(repository, FILE)
    return Published(repository, license, Path(found)) if isinstance(found, str) else None


def fetch(name: str) -> Published:
    """The published weights of a network, downloaded if they are not on this disk, after a line that says so."""
    import huggingface_hub as hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, license = describe(name)
    found = cached(name)
    if found is not None:
        log.info("Starting from %s in %s, license %s.", repository, found.file, license)
        return found
    try:
        about = hub.get_hf_file_metadata(hub.hf_hub_url(repository, FILE))
        log.info(
            "Downloading %s from huggingface.co: %.0f MB, license %s.",
            repository,
            (about.size or 0) / 1e6,
            license,
        )
        file = hub.hf_hub_download(repository, FILE, revision=about.commit_hash)
    except Exception as error:  # there is no end to what a network raises
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise SettingError(
                "model.pretrained", f"cannot be true: {repository} has no {FILE}, and nothing else is read."
            ) from None
        raise UserError(
            f"{repository} cannot be fetched from huggingface.co ({fit.in_words(error)}). Try again, or set "
            "model.weights to a file that you have."
        ) from None
    return Published(repository, license, Path(file))


def load(architecture: Architecture, file: Path) -> tuple[nn.Module, tuple[str, ...]]:
    """A network of timm with the weights in `file`, and a sentence for each tensor that timm had to fit.

    timm is given tensors and opens nothing. It leaves classifiers out, and fits input channels, patches and positions.
    """
    name, _, _, options, channels = architecture
    given = options_of(options, timm_networks.RESERVED)
    with torch.device("meta"):
        names = timm_networks.create(name.removeprefix(TIMM), channels, given).state_dict().keys()
    state = network_in(read_state(file), names, file)
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}  # before they are fitted
    logger, missing = logging.getLogger("timm.models._builder"), _Missing()
    level = logger.level
    logger.addHandler(missing)
    logger.setLevel(logging.INFO)
    try:
        network: nn.Module = timm_networks.timm().create_model(
            name.removeprefix(TIMM),
            pretrained=True,
            pretrained_cfg_overlay={"state_dict": state, "custom_load": False},
            num_classes=0,
            in_chans=channels,
            **given,
        )
    except Exception as error:  # there is no end to what loading raises
        told = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"The weights in {file} do not fit {name} ({told}).") from None
    finally:
        logger.removeHandler(missing)
        logger.setLevel(level)
    if missing.names:
        raise UserError(
            f"The weights in {file} do not fit {name}: {', '.join(missing.names[:5])} is missing."
        )
    fitted = [
        f"{key} is fitted from {shapes[key]} to {list(tensor.shape)}"
        for key, tensor in network.state_dict().items()
        if key in shapes and shapes[key] != list(tensor.shape)
    ]
    return network, tuple(fitted)


class _Missing(logging.Handler):
    """timm says only in its log that a file did not have all weights of a network, and goes on with random ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"Missing keys \((.*)\)", record.getMessage())
        if found:  # of counters, as older files have none
            self.names += [name for name in found[1].split(", ") if not name.endswith("num_batches_tracked")]


def sha256(file: Path) -> str:
    """The hash of a file. Nothing says what it ought to be: it is a record."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
