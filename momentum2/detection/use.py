"""What a fine-tuned detector is for: scores on a test set, or objects in a folder of images."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from momentum2.detection.data import open_data
from momentum2.detection.finetune import style
from momentum2.detection.folder import detect_in_folder
from momentum2.detection.presets import DetectConfig, preset
from momentum2.detection.saved import DetectorCard, load_detector, read_card
from momentum2.detection.schedule import check
from momentum2.detection.scores import DetectionScores
from momentum2.distributed.together import joined
from momentum2.errors import SettingError, UserError
from momentum2.runs.names import CONFIG, DETECTIONS
from momentum2.settings import from_file, override, understood
from momentum2.terminal import is_first
from momentum2.training.device import choose_device

log = logging.getLogger("momentum2")

#: What may be another one than in training.
_AT_USE = frozenset(
    {
        *("head.score_threshold", "head.detections", "data.test_short_edge", "data.max_long_edge"),
        *("train.device", "train.threads"),
    }
)
_AT_TEST = _AT_USE | {
    *("data.name", "data.root", "data.test_split", "data.test_size", "data.scene_size", "train.seed"),
}


def evaluate(run: Path, given: Mapping[str, object], out: Path | None = None) -> dict[str, Any]:
    """Evaluate the detector in `run`, on the test set of its training unless other data are given.

    Results go to `out`, by default a folder in the run: the run's own are those of its training.
    """
    card, config = _settings(run, given, _AT_TEST)
    detector = load_detector(run, card)
    device = choose_device(config.train.device)
    detector.to(device)
    with joined(device):
        data = open_data(config.data, training=False, seed=config.train.seed, masks=detector.masks)
        if tuple(data.class_names) != tuple(card.class_names):
            raise UserError(
                f"{run} detects different classes from those of this data set. Check data.name and data.root."
            )
        found = DetectionScores(detector, data, device, style(config.data))
        found.write(out or _beside(run) / "evaluation")
    return found.scores


def detect_in(run: Path, images: Path, given: Mapping[str, object], out: Path | None = None) -> Path:
    """Run the detector in `run` on the images of a folder; returns the folder of its results."""
    card, config = _settings(run, given, _AT_USE)
    detector = load_detector(run, card)
    device = choose_device(config.train.device)
    out = out or _beside(run) / "images"
    count = detect_in_folder(detector.to(device), card, images, out, device)
    if is_first():
        log.info("%s images: %s and %s", count, out / DETECTIONS, out / "pictures")
    return out


def _settings(
    run: Path, given: Mapping[str, object], allowed: frozenset[str]
) -> tuple[DetectorCard, DetectConfig]:
    """The detector's card and settings with what is given, which may differ from its training only where `allowed`."""
    card = read_card(run)
    trained = preset(card.model, override(DetectConfig(), given).data.name)
    if (run / CONFIG).exists():
        trained = from_file(trained, run / CONFIG)
    sizes = replace(trained.data, test_short_edge=card.short_edge, max_long_edge=card.max_long_edge)
    # Scenes stay as large as they were, whatever size the detector is shown.
    sizes = replace(sizes, scene_size=sizes.scene_size or card.short_edge)
    trained = replace(trained, model=card.model, encoder=card.encoder, head=card.head, data=sizes)
    config = override(trained, given)
    for name in understood(trained, given):
        before, now = (attrgetter(name)(settings) for settings in (trained, config))
        if name not in allowed and now != before:
            raise SettingError(
                name, f"is {before} in {run} and cannot be {now} after training. Leave it out."
            )
    check(config)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    card = replace(
        card,
        head=config.head,
        short_edge=config.data.test_short_edge,
        max_long_edge=config.data.max_long_edge,
    )
    return card, config


def _beside(run: Path) -> Path:
    return run if run.is_dir() else run.parent
