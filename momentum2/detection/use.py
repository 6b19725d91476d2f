"""What a fine-tuned detector is for: scores on a test set, or objects in a folder of images."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from momentum2.detection.data import open_data
from momentum2.detection.finetune import style
from momentum2.detection.folder import detect_in_folder
from momentum2.detection.presets import DetectConfig, preset
from momentum2.detection.saved import DetectorCard, load_detector
from momentum2.detection.schedule import check
from momentum2.detection.scores import Evaluation
from momentum2.distributed.together import joined
from momentum2.errors import UserError
from momentum2.runs.names import CONFIG, DETECTIONS
from momentum2.settings import from_file, override
from momentum2.training.device import choose_device


def evaluate(run: Path, given: Mapping[str, object], out: Path | None = None) -> None:
    """Evaluate the detector in `run`, on the test set of its training unless other data are given.

    Results go to `out`, by default a folder in the run: the run's own are those of its training.
    """
    detector, card = load_detector(run)
    config = _config(run, card, given)
    device = choose_device(config.train.device)
    detector.to(device)
    with joined(device):
        data = open_data(config.data, training=False, seed=config.train.seed)
        if tuple(data.class_names) != tuple(card.class_names):
            raise UserError(
                f"{run} detects other classes than this data set has. Check data.name and data.root."
            )
        Evaluation(detector, data, device, style(config.data)).write(out or _beside(run) / "evaluation")


def detect_in(run: Path, images: Path, given: Mapping[str, object], out: Path | None = None) -> str:
    """Run the detector in `run` on the images of a folder; says where its results are."""
    detector, card = load_detector(run)
    device = choose_device(_config(run, card, given).train.device)
    out = out or _beside(run) / "images"
    count = detect_in_folder(detector.to(device), card, images, out, device)
    return f"{count} images: {out / DETECTIONS} and {out / 'pictures'}"


def _config(run: Path, card: DetectorCard, given: Mapping[str, object]) -> DetectConfig:
    config = preset(card.model, override(DetectConfig(), given).data.name)
    sizes = replace(config.data, test_short_edge=card.short_edge, max_long_edge=card.max_long_edge)
    config = replace(config, data=sizes)
    if (run / CONFIG).exists():
        config = from_file(config, run / CONFIG)
    config = override(config, given)
    check(config)
    return config


def _beside(run: Path) -> Path:
    return run if run.is_dir() else run.parent
