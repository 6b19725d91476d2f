"""The paper's tables of detection: one encoder after the other under the same detectors."""

from collections.abc import Mapping
from dataclasses import dataclass

from momentum2.config import Network
from momentum2.reproduce.rows import Numbers, Pretraining, Row, Scale, Table, duration
from momentum2.reproduce.scales import Base, base, detection

_BOX = ("box AP", "box AP50", "box AP75")
_MASK = ("mask AP", "mask AP50", "mask AP75")

_INITIALIZATIONS = ("random", "supervised", "moco", "byol", "m2")

#: Model, schedule: the numbers of each initialization, of boxes and, where there are masks, of these.
_COCO: dict[tuple[str, str], tuple[tuple[float, ...], ...]] = {
    ("mask_rcnn", "1x"): (
        (31.0, 49.5, 33.2, 28.5, 46.8, 30.4),
        (38.9, 59.6, 42.7, 35.4, 56.5, 38.1),
        (38.5, 58.9, 42.0, 35.1, 55.9, 37.7),
        (39.6, 60.9, 43.3, 36.7, 58.0, 39.3),
        (39.7, 61.2, 43.2, 36.8, 58.0, 39.6),
    ),
    ("mask_rcnn", "2x"): (
        (36.7, 56.7, 40.0, 33.7, 53.8, 35.9),
        (40.6, 61.3, 44.4, 36.8, 58.1, 39.5),
        (40.8, 61.6, 44.7, 36.9, 58.4, 39.7),
        (41.6, 62.9, 45.8, 38.2, 59.9, 41.1),
        (41.8, 62.8, 45.9, 38.4, 60.1, 41.2),
    ),
    ("cascade_rcnn", "1x"): (
        (35.3, 51.0, 38.3, 31.0, 48.8, 33.3),
        (42.1, 59.8, 45.9, 36.4, 57.1, 39.3),
        (42.4, 59.8, 46.1, 37.0, 57.2, 40.1),
        (43.6, 61.5, 47.5, 38.3, 59.0, 41.6),
        (43.6, 61.6, 47.3, 38.2, 58.8, 41.2),
    ),
    ("cascade_rcnn", "2x"): (
        (40.7, 57.7, 44.2, 35.9, 55.5, 39.1),
        (43.5, 61.3, 47.4, 37.7, 58.7, 40.8),
        (44.3, 61.9, 48.1, 38.7, 59.5, 42.0),
        (45.0, 62.9, 48.8, 39.3, 60.5, 42.6),
        (45.1, 63.0, 49.0, 39.4, 60.7, 42.8),
    ),
    ("retinanet", "1x"): (
        (24.4, 38.8, 25.8),
        (37.3, 56.6, 39.8),
        (37.2, 56.4, 40.0),
        (36.4, 55.9, 39.2),
        (35.9, 55.3, 38.4),
    ),
    ("retinanet", "2x"): (
        (31.2, 48.1, 33.3),
        (38.7, 58.2, 41.4),
        (39.0, 58.3, 41.6),
        (39.5, 59.3, 42.6),
        (39.4, 59.3, 42.2),
    ),
    ("fcos", "1x"): (
        (25.0, 39.2, 26.4),
        (38.7, 57.6, 41.9),
        (39.0, 57.5, 42.0),
        (37.6, 56.0, 41.0),
        (37.7, 56.8, 40.8),
    ),
    ("fcos", "2x"): (
        (31.8, 48.2, 33.6),
        (38.5, 57.0, 41.3),
        (38.8, 57.1, 41.7),
        (39.5, 58.3, 42.5),
        (39.9, 59.0, 43.2),
    ),
}

#: Mask R-CNN on LVIS 0.5, 2x: the numbers of masks.
_LVIS = {
    "random": (22.5, 34.8, 23.8),
    "supervised": (24.4, 37.8, 25.8),
    "moco": (24.1, 37.4, 25.5),
    "m2": (26.1, 39.8, 28.1),
}


def coco(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    rows = []
    for (model, schedule), published in _COCO.items():
        numbers = {
            init: dict(zip(_BOX + _MASK, values, strict=False))
            for init, values in zip(_INITIALIZATIONS, published, strict=True)
        }
        if schedule == "1x" or b.scale != "smoke":
            rows += _rows(_initializations(b, epochs), b, model, "coco", schedule, numbers)
    return Table(
        "coco",
        scale,
        "Object detection and instance segmentation" + (" on COCO" if scale == "paper" else " on shapes"),
        "Does the pretrained backbone transfer?",
        tuple(rows),
        _BOX + _MASK,
    )


def lvis(scale: Scale, epochs: int | None = None) -> Table:
    b = base(scale, "imagenet-128gpu", epochs)
    numbers = {init: dict(zip(_MASK, values, strict=True)) for init, values in _LVIS.items()}
    return Table(
        "lvis",
        scale,
        "Long-tailed instance segmentation" + (" on LVIS 0.5" if scale == "paper" else ": shapes instead"),
        "Does the pretrained backbone transfer where classes are rare?"
        + (" On shapes none is: these are coco's mask_rcnn rows." if b.small else ""),
        tuple(_rows(_initializations(b, epochs), b, "mask_rcnn", "lvis", "2x", numbers)),
        _MASK,
    )


@dataclass(frozen=True)
class _Start:
    """What a detector starts from: a pretraining and the network of it, None for its architecture alone."""

    label: str
    run: Pretraining
    network: Network | None
    note: str | None = None


def _initializations(b: Base, epochs: int | None) -> dict[str, _Start]:
    """What a detector may start from; on a CPU only our own encoder and none."""
    ours = b.pretraining(b.size(4 * b.samples))
    random = _Start("random init.", ours, None)
    m2 = _Start(f"ours, {duration(ours.epochs)}", ours, "teacher")
    if b.small:
        return {"random": random, "m2": m2}
    moco, byol, supervised = (
        base("paper", recipe, epochs).pretraining({}) for recipe in ("moco-v2-8gpu", "byol", "supervised")
    )
    which = "The paper does not say which MoCo this is; here it is MoCo v2 on 8 GPUs."
    return {
        "random": random,
        "supervised": _Start("supervised", supervised, "student"),
        "moco": _Start(f"MoCo, {duration(moco.epochs)}", moco, "student", which),
        "byol": _Start(f"BYOL, {duration(byol.epochs)}", byol, "student"),
        "m2": m2,
    }


def _rows(
    starts: Mapping[str, _Start],
    b: Base,
    model: str,
    data: str,
    schedule: str,
    published: Mapping[str, Numbers],
) -> list[Row]:
    return [
        Row(
            f"{data}-{model}-{schedule}-{init}",
            f"{model}, {schedule}, {start.label}",
            start.run,
            detection(b, model, data, schedule, start.network),
            published[init],
            start.note,
        )
        for init, start in starts.items()
        if init in published
    ]
