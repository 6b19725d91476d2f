"""The command `momentum2 detect`."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from momentum2.arguments import ConfigFile, Options, Words
from momentum2.engine.device import choose_device
from momentum2.engine.run import CONFIG, Resume
from momentum2.engine.together import joined
from momentum2.errors import UserError
from momentum2.evaluate.detection.config import DetectConfig, preset
from momentum2.evaluate.detection.data import open_data
from momentum2.evaluate.detection.finetune import finetune, style
from momentum2.evaluate.detection.folder import detect_in_folder
from momentum2.evaluate.detection.plan import check
from momentum2.evaluate.detection.report import Evaluation
from momentum2.evaluate.detection.saved import load_detector
from momentum2.settings import from_file

_DESCRIPTION = (
    "Fine-tune a detector on the encoder of RUN (a run directory or a file of weights) and evaluate it; the same "
    "command resumes it. The defaults are those of --model and --data.name: the paper's for coco and lvis, minutes on "
    "a laptop for shapes. With --eval-only or --images, RUN is the --out of an earlier fine-tuning."
)


@dataclass(frozen=True)
class DetectOptions:
    """What is done, and where the results go.

    Args:
        out: The run directory, or where other results go.
        resume: auto resumes a run or starts one; never only starts; must only resumes.
        eval_only: Evaluate the fine-tuned detector in RUN.
        images: Run the detector in RUN on this folder.
    """

    out: str | None = None
    resume: Resume = "auto"
    eval_only: bool = False
    images: str | None = None


def detect(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Options(
        "detect", _DESCRIPTION, "[RUN] [options]", (DetectOptions(), ConfigFile()), DetectConfig()
    )
    words = parser.parse(arguments)
    named = words.override(DetectConfig())
    if words.help:
        return parser.show(preset(named.model, named.data.name))
    run, options = words.at_most_one(), words.read(DetectOptions())
    if options.eval_only or options.images is not None:
        if run is None:
            raise UserError("Name the run of the fine-tuned detector: momentum2 detect RUN --eval-only.")
        return _use(Path(run), words, options)
    if not options.out:
        raise UserError("Choose a run directory with --out DIR.")
    # The settings of this model on these data are the defaults; what the user said still wins.
    config = words.override(preset(named.model, named.data.name))
    if not finetune(config, run, Path(options.out), options.resume):
        print("Stopped and saved: run the same command again to go on.")
        return os.EX_TEMPFAIL  # asks schedulers to try again
    return 0


def _use(run: Path, words: Words, options: DetectOptions) -> int:
    """Evaluate a fine-tuned detector, or run it on a folder."""
    detector, card = load_detector(run)
    config = preset(card.model, words.override(DetectConfig()).data.name)
    sizes = replace(config.data, test_short_edge=card.short_edge, max_long_edge=card.max_long_edge)
    config = replace(config, data=sizes)
    if (run / CONFIG).exists():  # the test set of its training, unless another is named
        config = from_file(config, run / CONFIG)
    config = words.override(config)
    check(config)
    device = choose_device(config.train.device)
    detector.to(device)
    # Never into the run itself, whose results are those of its own training.
    place = "evaluation" if options.images is None else "images"
    out = Path(options.out) if options.out else (run if run.is_dir() else run.parent) / place
    if options.images is not None:
        count = detect_in_folder(detector, card, Path(options.images), out, device)
        print(f"{count} images: {out / 'detections.json'} and {out / 'pictures'}")
        return 0
    with joined(device):
        data = open_data(config.data, training=False, seed=config.train.seed)
        if tuple(data.class_names) != tuple(card.class_names):
            raise UserError(
                f"{run} finds other classes than these data have; check --data.name and --data.root."
            )
        Evaluation(detector, data, device, style(config.data)).write(out)
    return 0
