"""From settings to a run directory with a fine-tuned detector and its scores in it."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from momentum2 import backbones, distributed
from momentum2.config import Resume
from momentum2.detection.batches import Batches
from momentum2.detection.coco_eval import Style
from momentum2.detection.data import DetectionData, open_data
from momentum2.detection.detector import Detector
from momentum2.detection.presets import WITH_MASKS, DetectConfig, DetectionDataConfig, EncoderConfig
from momentum2.detection.sampling import Sampler, repeat_factors
from momentum2.detection.saved import DetectorCard, architecture_of, save_detector
from momentum2.detection.schedule import check, resolve
from momentum2.detection.scores import DetectionScores
from momentum2.distributed.together import joined
from momentum2.errors import SettingError, UserError
from momentum2.runs.directory import open_run
from momentum2.runs.encoder import load_encoder
from momentum2.runs.names import DETECTOR
from momentum2.seeds import derive
from momentum2.training.device import choose_device, keep_large_blocks
from momentum2.training.job import Job
from momentum2.training.loop import fit

log = logging.getLogger("momentum2")


def with_encoder(config: DetectConfig, run: str | None) -> tuple[DetectConfig, backbones.Encoder]:
    """The encoder to start from, and the settings with its architecture filled in.

    Random weights depend on the seed alone; RUN then says the architecture, or the `encoder` settings do.
    """
    source = run if config.init in ("encoder", "random") else config.init
    if config.init == "encoder" and run is None:
        raise SettingError(
            "init", "is encoder, which needs RUN. Pass a run, or choose random or a weights file."
        )
    loaded = load_encoder(source, config.network) if source is not None else None
    if loaded is not None:
        card = loaded.card
        options = list(card.options) or None
        config = replace(config, encoder=EncoderConfig(card.backbone, card.stem, card.width, options))
    architecture = architecture_of(config.encoder)  # before the seed: it may draw
    torch.manual_seed(derive(config.train.seed, "initial weights"))
    encoder = backbones.of(architecture)
    if loaded is not None and config.init != "random":
        encoder.load_state_dict(loaded.encoder.state_dict())
    return config, encoder


def make_sampler(config: DetectConfig, data: DetectionData) -> Sampler:
    """Who is shown when."""
    count = len(data.image_ids)
    threshold = config.data.repeat_threshold
    factors = (
        repeat_factors([data.classes(i) for i in range(count)], threshold) if threshold else np.ones(count)
    )
    return Sampler(factors, config.train.seed, config.train.batch_size)


def style(data: DetectionDataConfig) -> Style:
    """Whose rules of evaluation hold."""
    return "lvis" if data.name == "lvis" else "coco"


def finetune(config: DetectConfig, run: str | None, out: Path, resume: Resume = "auto") -> bool:
    """Fine-tune and evaluate in the run directory `out`, from its newest checkpoint if there is one.

    Returns whether the run is finished; a signal may have stopped it early.
    """
    check(config)
    device = choose_device(config.train.device)
    keep_large_blocks()
    with joined(device):
        config, encoder = with_encoder(config, run)
        masks = config.model in WITH_MASKS
        data, test = (
            open_data(config.data, training, config.train.seed, masks) for training in (True, False)
        )
        if data.class_names != test.class_names:
            raise UserError("The training and test annotations list different classes. Use files that agree.")
        if distributed.is_main():
            sets = (f"{len(images.image_ids):,} images of {images.name}" for images in (data, test))
            log.info("data  %s; evaluated on %s", *sets)
        card = make_card(config, data)
        detector = card.build(encoder).to(device)
        evaluation = DetectionScores(detector, test, device, style(config.data))
        with open_run(out, config, resume, frozenset({"train.devices"})) as directory:
            finished = fit(make_job(config, detector, data, evaluation, device), directory)
            if finished:
                if distributed.is_main():
                    save_detector(out / DETECTOR, detector, card)
                evaluation.write(out)
        return finished


def make_card(config: DetectConfig, data: DetectionData) -> DetectorCard:
    """What the detector of these settings is."""
    return DetectorCard(
        model=config.model,
        encoder=config.encoder,
        head=config.head,
        short_edge=config.data.test_short_edge,
        max_long_edge=config.data.max_long_edge,
        class_names=data.class_names,
        category_ids=data.category_ids,
    )


def make_job(
    config: DetectConfig,
    detector: Detector,
    data: DetectionData,
    evaluation: DetectionScores,
    device: torch.device,
) -> Job:
    """What the loop turns."""
    sampler = make_sampler(config, data)
    plan = resolve(config, sampler.steps_per_epoch, distributed.world_size())
    return Job(
        method=detector,
        batches=Batches(
            data, config.data, sampler, detector.masks, plan.steps, device, config.train.accumulate
        ),
        lr=plan.lr,
        steps=plan.steps,
        steps_per_epoch=plan.steps_per_epoch,
        lr_peak=plan.lr_base,
        train=config.train,
        optim=config.optim,
        monitor=config.monitor,
        device=device,
        validate=(lambda done: evaluation.headline()) if config.evaluate_every else None,
        validate_every=config.evaluate_every * plan.steps_per_epoch,
    )
