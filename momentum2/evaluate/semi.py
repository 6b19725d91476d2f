"""Semi-supervised evaluation: the whole network fine-tuned on a few labels."""

from dataclasses import dataclass
from pathlib import Path

from momentum2.config import Batch, Count, NotNegative, OptimConfig, Resume
from momentum2.data.dataset import Subset
from momentum2.errors import SettingError, UserError
from momentum2.evaluate.accuracy import measure
from momentum2.evaluate.classifier import Classifier, classifier_config, run_directory, train_classifier
from momentum2.evaluate.features import shuffled_views
from momentum2.evaluate.subject import Subject
from momentum2.evaluate.subsets import listed, stratified
from momentum2.norms.recalibrate import recalibrate
from momentum2.runs.results import PIXELS, Result, Settings


@dataclass(frozen=True)
class SemiOptions:
    """Which labels may be used, and how the network is fine-tuned on them.

    Args:
        fraction: Share of each class's training images that keep their labels, such as 0.01 or 0.1.
        list: Instead of a fraction: a text file of image names, such as SimCLR's lists for ImageNet.
        epochs: Passes over these images (default: 20 if they are less than 5% of all, else 15).
        batch_size: Images per step, over all processes (default: 1024, or all if they are fewer).
        lr: Learning rate per 256 images.
        out: Run directory of the fine-tuning (default: beside the weights).
        resume: auto: resume or start. never: only start. must: only resume.
    """

    fraction: float | None = None
    list: str | None = None
    epochs: Count | None = None
    batch_size: Batch | None = None
    lr: NotNegative = 0.02  # the paper's 0.08 at its batch size of 1024
    out: str | None = None
    resume: Resume = "auto"


def evaluate_semi(subject: Subject, options: SemiOptions) -> Result | None:
    """Accuracy after fine-tuning on some of the labels; None if a signal stopped it.

    A subject with `weights="random"` is the baseline: the same training on the same labels from scratch.
    """
    o, data = options, subject.labeled
    if subject.name == PIXELS:
        raise SettingError(
            "weights", "cannot be pixels, because there is nothing to fine-tune. Use given or random."
        )
    if (o.fraction is None) == (o.list is None):
        raise UserError("Choose the labels that may be used: pass either fraction or list.")
    if o.fraction is not None:
        assert data.train.labels is not None
        chosen, name = stratified(data.train.labels, o.fraction, subject.options.seed), f"semi {o.fraction:g}"
    else:
        chosen, name = listed(data.train.names, Path(str(o.list))), f"semi {Path(str(o.list)).stem}"
    images = Subset(data.train, chosen)
    epochs = o.epochs or (20 if len(chosen) < 0.05 * len(data.train) else 15)
    batch_size = o.batch_size or min(1024, len(chosen))
    config = classifier_config(subject, images, False, epochs, batch_size, OptimConfig("sgd", o.lr, 0.0))
    method = train_classifier(subject, config, images, run_directory(subject, name, o.out), o.resume)
    if method is None:
        return None
    seed, workers = subject.options.seed, subject.options.data.workers
    shown = shuffled_views(images, subject.spec, seed=seed, device=subject.device, workers=workers)
    recalibrate(method.encoder, shown)
    test = subject.features(data.test, Classifier(method, len(data.class_names)))
    assert test.labels is not None
    trained: Settings = {"labels": len(chosen), "epochs": epochs, "batch size": batch_size, "lr": o.lr}
    return Result(
        name,
        subject.data_name,
        subject.name,
        measure(test.features, test.labels, data.class_names, subject.options.seed),
        settings=subject.settings | trained,
    )
