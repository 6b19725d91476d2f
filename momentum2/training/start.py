"""The weights that a run starts from, if they are not random. They are read once; then there is a checkpoint."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

from momentum2 import backbones
from momentum2.backbones import published
from momentum2.config import Config
from momentum2.errors import UserError
from momentum2.runs.card import architecture_of
from momentum2.weights import read_state

log = logging.getLogger("momentum2")

#: What is kept of them in plan, card and checkpoint: name, sha256 and, where it is known, license.
Record = Mapping[str, str]


class Start(NamedTuple):
    """The weights that a run starts from.

    Args:
        record: What is kept of them; None for random weights.
        file: Where they are; None in a run that goes on from a checkpoint.
    """

    record: Record | None
    file: Path | None


def starting_weights(config: Config, before: Mapping[str, Any]) -> Start:
    """What `config` starts from; `before` is what the newest checkpoint says of its run, empty if there is none."""
    model = config.model
    if not model.pretrained and not model.weights:
        return Start(None, None)
    if before:
        record = before.get("weights")
        if record is not None:
            _compare(config, record)
        return Start(record, None)
    if model.pretrained:
        found = published.fetch(model.backbone)
        record = {"name": found.repository, "license": found.license, "sha256": published.sha256(found.file)}
        return Start(record, found.file)
    file = Path(cast(str, model.weights))
    if not file.is_file():
        raise UserError(f"There is no weights file {file}.")
    read_state(file)  # refuse a file that holds no weights before hashing it
    return Start({"name": file.name, "sha256": published.sha256(file)}, file)


def started(config: Config, file: Path) -> backbones.Encoder:
    """The encoder of a run, a network of timm, with the weights in `file`."""
    architecture = architecture_of(config)
    encoder, fitted = published.load(architecture, file)
    for sentence in fitted:
        log.info("By timm's rules, %s.", sentence)
    if architecture.channels not in (1, 3) and fitted:
        log.info("Channels beyond three repeat those of RGB, scaled down; their sum is not kept.")
    return backbones.with_feature_dim(encoder, config.data.image_size, architecture.channels)


def _compare(config: Config, record: Record) -> None:
    """Say it if the name now means other weights than those that the run began with; it goes on all the same."""
    if config.model.pretrained:
        found = published.cached(config.model.backbone)
        file = found.file if found else None
    else:
        file = Path(cast(str, config.model.weights))
    if file is None or not file.is_file():
        return
    same = False
    with suppress(UserError):  # of what is no file of weights any more
        read_state(file)
        same = published.sha256(file) == record["sha256"]
    if not same:
        log.warning(
            "%s is not what this run started from (SHA-256 %s); the run resumes from its checkpoint.",
            file,
            record["sha256"],
        )
