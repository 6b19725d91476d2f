"""What a fine-tuned detector is for: scores on a test set, or objects in a folder of images."""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import torch

from momentum2.detection.data import open_data
from momentum2.detection.finetune import style
from momentum2.detection.folder import detect_in_folder
from momentum2.detection.presets import DetectConfig, preset
from momentum2.detection.saved import DetectorCard, load_detector, read_card
from momentum2.detection.schedule import check
from momentum2.detection.scores import Evaluation
from momentum2.distributed.together import joined
from momentum2.errors import SettingError, UserError
from momentum2.runs.names import CONFIG, DETECTIONS
from momentum2.settings import from_file, override, understood
from momentum2.training.device import choose_device

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


def evaluate(run: Path, given: Mapping[str, object], out: Path | None = None) -> None:
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
                f"{run} detects other classes than this data set has. Check data.name and data.root."
            )
        Evaluation(detector, data, device, style(config.data)).write(out or _beside(run) / "evaluation")


def detect_in(run: Path, images: Path, given: Mapping[str, object], out: Path | None = None) -> str:
    """Run the detector in `run` on the images of a folder; says where its results are."""
    card, config = _settings(run, given, _AT_USE)
    detector = load_detector(run, card)
    device = choose_device(config.train.device)
    out = out or _beside(run) / "images"
    count = detect_in_folder(detector.to(device), card, images, out, device)
    return f"{count} images: {out / DETECTIONS} and {out / 'pictures'}"


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
