"""Weights for the tools that people already use. To add one: write its file, add its line."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from momentum2 import _torchvision
from momentum2.augment import render
from momentum2.config import OWN, DataConfig, DataName, Network
from momentum2.data import iterate, open_dataset
from momentum2.errors import SettingError, UserError, called, hint
from momentum2.export import detectron2, onnx, timm, torchvision
from momentum2.export.model_card import model_card
from momentum2.export.tool import Tool
from momentum2.files import whole_folder, write_new
from momentum2.norms.recalibrate import recalibrate as recalibrate_norms
from momentum2.runs.card import EncoderCard
from momentum2.runs.encoder import load_encoder

FORMATS: dict[str, Tool] = {
    "torchvision": torchvision.TOOL,
    "timm": timm.TOOL,
    "detectron2": detectron2.TOOL,
    "onnx": onnx.TOOL,
    "huggingface": timm.TOOL,  # the Hub's folders are timm's
}


def possible(card: EncoderCard) -> str:
    """The formats that can have a network, and for one that was made small what would give it the others."""
    if card.backbone == OWN:
        return "onnx"
    refused = []
    for name, tool in FORMATS.items():
        try:
            tool.check(card)
        except UserError:
            refused.append(name)
    told = ", ".join(name for name in FORMATS if name not in refused)
    needed = {
        "model.backbone resnet18": card.backbone == "resnet10",
        "model.stem imagenet": card.stem != "imagenet",
        "model.width 1": card.width != 1,
    }
    settings = [setting for setting, is_needed in needed.items() if is_needed]
    if refused and settings:
        told += f"; {', '.join(refused)} with {', '.join(settings)}"
    return told


def export(
    source: str | Path,
    format: str,
    out: str | Path,
    network: Network | None = None,
    recalibrate: str | Path | None = None,
    license: str = "unknown",
    encoder: nn.Module | None = None,
) -> str:
    """Write an encoder for another tool into the new folder `out`, whole or not at all, with a model card.

    Args:
        source: What `load_encoder` takes: a run directory, a checkpoint or a file of weights.
        format: One of `FORMATS`.
        out: A folder that does not exist yet, or is empty.
        network: teacher or student; by default the one that the run exports.
        recalibrate: A folder or archive of images, to measure the batch-norm statistics again.
        license: License of the weights, for the model card.
        encoder: The network, where the run was started with a custom one.

    Returns:
        The lines of Python that load what was written; on this machine, so where torchvision needs momentum2 (a CPU
        torch beside a CUDA torchvision), its import is the first of them.
    """
    if format not in FORMATS:
        raise SettingError("format", f"{format!r} does not exist. {hint(format, FORMATS)}")
    source, out, tool = Path(source), Path(out), FORMATS[format]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SettingError("out", f"{out} already exists. Choose another folder, or remove it.")
    loaded = load_encoder(source, network, encoder=encoder)
    if loaded.card.backbone == OWN and format != "onnx":
        raise SettingError("format", f"{format} does not support custom networks. Choose onnx.")
    tool.check(loaded.card)
    if recalibrate is not None:
        recalibrate_norms(loaded.encoder, _views(Path(recalibrate), loaded.card))
    lines = tool.lines(loaded, out)
    needs_us = tool.uses_torchvision and _torchvision.supplied()
    again = Path(recalibrate).name if recalibrate else None
    card = model_card(loaded.card, source, lines, license, again, tool.loaded_by_timm)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(out) as folder:
            tool.write(loaded, folder)
            name = "README.md" if tool.loaded_by_timm else "MODEL_CARD.md"  # the Hub shows the former
            write_new(folder / name, card)
    except OSError as error:
        raise SettingError(
            "out", f"{out} cannot be written ({error.strerror}). Choose another folder."
        ) from None
    return f"import momentum2  # torchvision needs it here\n{lines}" if needs_us else lines


def _views(images: Path, card: EncoderCard, batch_size: int = 64) -> Iterator[Tensor]:
    """The images as evaluations show them, shuffled, because a folder has them class by class."""
    name: DataName = "folder" if images.is_dir() else "archive"
    with called({"data.root": "recalibrate"}):
        dataset = open_dataset(card.as_seen(DataConfig(name, str(images), cache="off")))
    if len(dataset) < 2:
        raise SettingError(
            "recalibrate", f"{images} has {len(dataset)} image, but batch norm needs at least 2."
        )
    order = np.random.default_rng(0).permutation(len(dataset))
    while len(dataset) % batch_size == 1:  # a single image has no variance where its map is 1x1
        batch_size -= 1
    for batch in iterate(dataset, card.view, batch_size, indices=order):
        yield render(batch.images, batch.draws, (card.view,))[0]
