"""Every setting of fine-tuning a detector, and their defaults for each model and data set."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from momentum2.config import (
    CountOrZero,
    Limits,
    MonitorConfig,
    Network,
    OptimConfig,
    Share,
    Stem,
    TrainConfig,
    Width,
    Workers,
)

DetectorName = Literal["faster_rcnn", "mask_rcnn", "cascade_rcnn", "retinanet", "fcos"]
DetectionDataName = Literal["shapes", "coco", "lvis"]
ScheduleName = Literal["1x", "2x", "epochs"]
TowerNorm = Literal["none", "group"]

Edge = Annotated[int, Limits(1, 8192)]  # of an image, in pixels
Channels = Annotated[int, Limits(1, 2**16)]
Proposals = Annotated[int, Limits(1, 10**6)]
Images = Annotated[int, Limits(1, 10**7)]

#: The detectors with region proposals, and those that find masks.
TWO_STAGE: frozenset[DetectorName] = frozenset({"faster_rcnn", "mask_rcnn", "cascade_rcnn"})
WITH_MASKS: frozenset[DetectorName] = frozenset({"mask_rcnn", "cascade_rcnn"})


@dataclass(frozen=True)
class EncoderConfig:
    """The backbone, if there is no RUN.

    Args:
        backbone: A torchvision ResNet or a timm network (timm/convnext_tiny).
        stem: First layers of torchvision's ResNets: imagenet (7x7/2 and pooling), cifar (3x3/1) or small (3x3/2).
        width: Multiplier of such a ResNet's channels.
        options: Arguments of the network's constructor, such as patch_size=8 (default: none).
    """

    backbone: str = "resnet50"
    stem: Stem = "imagenet"
    width: Width = 1.0
    options: list[str] | None = None


@dataclass(frozen=True)
class DetectionDataConfig:
    """Images with boxes and masks.

    Args:
        name: shapes (drawn, needs no files), coco (its file format) or lvis (its evaluation and sampling too).
        root: The folder that contains annotations/ and the folders of images.
        split: Split to train on: annotations/instances_SPLIT.json and SPLIT/, for LVIS annotations/lvis_SPLIT.json.
        test_split: Split to evaluate on.
        train_size: Train on the first n images of a seeded order.
        test_size: Evaluate on the first n images of a seeded order.
        short_edges: Lengths of an image's short edge in training, one drawn for each image.
        test_short_edge: Length of the short edge in evaluation.
        max_long_edge: Largest length of the long edge; images are scaled down to it.
        flip: Probability of a horizontal flip.
        repeat_threshold: Repeat images of classes that appear in less than this share of the images (LVIS: 0.001).
        workers: Threads that read images ahead; 0 reads them in the training thread.
        scene_size: Side of the scenes of shapes (default: test_short_edge).
    """

    name: DetectionDataName = "shapes"
    root: str | None = None
    split: str = "train"
    test_split: str = "test"
    train_size: Images | None = None
    test_size: Images | None = None
    short_edges: Annotated[list[Edge], Limits(1, 2000)] = field(
        default_factory=lambda: list(range(640, 801, 32))
    )
    test_short_edge: Edge = 800
    max_long_edge: Edge = 1333
    flip: Share = 0.5
    repeat_threshold: Share = 0.0
    workers: Workers = 2
    scene_size: Edge | None = None


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the parts on top of the backbone.

    Args:
        fpn_channels: Channels of the feature pyramid, the mask branch and the dense heads.
        tower_norm: Norm between the convolutions of RetinaNet's and FCOS's heads.
        box_width: Width of the two linear layers of the box branch.
        proposals: Proposals per image that leave the region proposal network; twice as many in a cascade's training.
        sampled: Proposals per image that the box branch learns from.
        score_threshold: Detections with a lower score are dropped.
        detections: At most this many detections per image.
        pool_samples: Points per bin along a side when boxes are pooled; 0 for one per cell of the map.
    """

    fpn_channels: Channels = 256
    tower_norm: TowerNorm = "none"
    box_width: Channels = 1024
    proposals: Proposals = 1000
    sampled: Proposals = 512
    score_threshold: Share = 0.05
    detections: Proposals = 100
    pool_samples: Annotated[int, Limits(0, 64)] = 2


@dataclass(frozen=True)
class DetectConfig:
    """Fine-tuning a detector.

    Args:
        model: The detector.
        init: Weights of the backbone: encoder (those of RUN), random, or a state dict (.safetensors or .pth).
        network: The encoder of RUN: teacher or student (default: the one that the run exports).
        schedule: 1x and 2x are 90,000 and 180,000 steps of 16 images; epochs counts train.epochs.
        encoder: The backbone.
        head: What is put on it.
        data: The images.
        train: Length, batch and device; train.steps overrides the schedule.
        optim: Optimizer; without optim.milestones the learning rate falls to a tenth after 2/3 and 8/9 of the steps.
        monitor: Logging and alarms.
        evaluate_every: Epochs between evaluations while training; 0 evaluates only at the end.
        warmup_steps: Steps of linear warm-up, at most a tenth of all; optim.warmup_epochs, if not 0, takes precedence.
    """

    model: DetectorName = "mask_rcnn"
    init: str = "encoder"
    schedule: ScheduleName = "1x"
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    data: DetectionDataConfig = field(default_factory=DetectionDataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    evaluate_every: CountOrZero = 0
    network: Network | None = None
    warmup_steps: CountOrZero = 0


def preset(model: DetectorName, data: DetectionDataName, backbone: str | None = None) -> DetectConfig:
    """The settings of `model` on `data`: the paper's for COCO and LVIS, a few minutes on two cores for shapes.

    A `backbone` that was named keeps the stem and the width of the small ResNet only if it is a ResNet.
    """
    found = _small(model) if data == "shapes" else _paper(model, data)
    if backbone is None:
        return found
    from momentum2.backbones import has_stem  # with torch, for which no help should wait

    return found if has_stem(backbone) else replace(found, encoder=EncoderConfig(backbone))


def _paper(model: DetectorName, data: DetectionDataName) -> DetectConfig:
    lvis = data == "lvis"
    images = DetectionDataConfig(
        name=data,
        split="v0.5_train" if lvis else "train2017",
        test_split="v0.5_val" if lvis else "val2017",
        short_edges=[800] if model == "fcos" else list(range(640, 801, 32)),
        repeat_threshold=0.001 if lvis else 0.0,
    )
    head = HeadConfig(tower_norm="group" if model == "fcos" else "none", pool_samples=0)
    if lvis:  # more than a thousand classes: keep more, with lower scores
        head = replace(head, score_threshold=1e-4, detections=300)
    return DetectConfig(
        model=model,
        schedule="1x",  # of LVIS's 56,740 images, 90,000 steps are the 25 epochs that are called 2x on COCO
        head=head,
        data=images,
        train=TrainConfig(batch_size=16, checkpoint_every=5000),
        # Per 256 images: 0.02 (two stages) or 0.01 (dense) for 16, as in detectron2.
        optim=OptimConfig(lr=0.32 if model in TWO_STAGE else 0.16, exclude_bias_and_norm=True),
        monitor=MonitorConfig(log_every=20),
        warmup_steps=1000,
    )


def _small(model: DetectorName) -> DetectConfig:
    """The network of the recipe quickstart. Scenes show at most four objects, so few proposals are enough."""
    channels = 32 if model in TWO_STAGE else 64  # the finest level of an R-CNN has four times the cells
    return DetectConfig(
        model=model,
        schedule="epochs",
        encoder=EncoderConfig("resnet18", "small", 0.25),
        head=HeadConfig(channels, "group", box_width=256, proposals=64, sampled=32, detections=20),
        data=DetectionDataConfig(short_edges=[80], test_short_edge=80, max_long_edge=160, workers=1),
        train=TrainConfig(epochs=2, batch_size=8, checkpoint_every=200),
        optim=OptimConfig(lr=1.28, exclude_bias_and_norm=True, clip_norm=10.0),
        evaluate_every=1,
        warmup_steps=50,
    )
