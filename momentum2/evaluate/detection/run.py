"""The command `momentum2 detect`."""

import os
from dataclasses import asdict, fields
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from momentum2.arguments import add_options, make_parser, parse
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

_DESCRIPTION = (
    "Fine-tune a detector on the encoder of RUN (a run directory or a file of weights) and evaluate it; the same "
    "command resumes it. The defaults are those of --model and --data.name: the paper's for coco and lvis, minutes on "
    "a laptop for shapes. With --eval-only or --images, RUN is the --out of an earlier fine-tuning."
)


def detect(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    options = parse(parser, arguments)
    if options.eval_only or options.images is not None:
        if options.run is None:
            raise UserError("Name the run of the fine-tuned detector: momentum2 detect RUN --eval-only.")
        return _use(parser, options, arguments)
    # The settings of this model on these data are the defaults; what the user said still wins.
    parser.set_defaults(asdict(preset(options.model, options.data.name)))
    options = parse(parser, arguments)
    if options.out is None:
        raise UserError("Say where the run directory goes: --out DIR.")
    if not finetune(_config(parser, options), options.run, Path(options.out), options.resume):
        print("Stopped and saved: run the same command again to go on.")
        return os.EX_TEMPFAIL  # asks schedulers to try again
    return 0


def _use(parser: ArgumentParser, options: Namespace, arguments: list[str]) -> int:
    """Evaluate a fine-tuned detector, or run it on a folder."""
    run = Path(options.run)
    detector, card = load_detector(run)
    parser.set_defaults(asdict(preset(card.model, options.data.name)))
    parser.set_defaults({"data.test_short_edge": card.short_edge, "data.max_long_edge": card.max_long_edge})
    # The test set of its training, unless another is named.
    trained = ["--config", str(run / CONFIG)] if (run / CONFIG).exists() else []
    options = parse(parser, [*trained, *arguments])
    config = _config(parser, options)
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


def _parser() -> ArgumentParser:
    parser = make_parser("detect", _DESCRIPTION)
    parser.add_argument("run", nargs="?", default=None, help="Run directory or file of weights.")
    parser.add_argument(
        "--out",
        type=str | None,
        default=None,
        help="The run directory, or where other results go.",
    )
    resume: object = Resume
    parser.add_argument(
        "--resume", type=resume, default="auto", help="auto goes on; never and must refuse otherwise."
    )
    parser.add_argument("--eval-only", action="store_true", help="Evaluate the fine-tuned detector in RUN.")
    parser.add_argument(
        "--images", type=str | None, default=None, help="Run the detector in RUN on this folder."
    )
    parser.add_argument(
        "--config", action="config", help="YAML file of settings, such as a run's config.yaml"
    )
    add_options(parser, DetectConfig)
    return parser


def _config(parser: ArgumentParser, options: Namespace) -> DetectConfig:
    values = parser.instantiate(options)
    return DetectConfig(**{f.name: values[f.name] for f in fields(DetectConfig)})
