"""Our numbers against pycocotools, and LVIS's rules against cases worked out by hand."""

import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from momentum2.detection.coco_eval import Kind, evaluate
from momentum2.detection.data import open_data
from momentum2.detection.presets import DetectionDataConfig
from momentum2.detection.targets import decode_masks, encode_masks

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def noisy(truth: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Detections as a middling detector would give: moved, missed, doubled, confused and invented objects."""
    draw = np.random.default_rng(seed)
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    categories = [c["id"] for c in truth["categories"]]
    found = []
    for annotation in truth["annotations"]:
        height, width = sizes[annotation["image_id"]]
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            x, y, w, h = (
                np.array(annotation["bbox"])
                + draw.normal(0, 0.06, 4) * np.array(annotation["bbox"])[[2, 3, 2, 3]]
            )
            w, h = max(w, 1.0), max(h, 1.0)
            mask = decode_masks([annotation["segmentation"]], height, width).roll(
                int(draw.integers(-2, 3)), 2
            )
            right = draw.random() < 0.85
            found.append(
                {
                    "image_id": annotation["image_id"],
                    "category_id": annotation["category_id"] if right else int(draw.choice(categories)),
                    "score": round(float(draw.random()), 2),  # with ties
                    "bbox": [float(v) for v in (x, y, w, h)],
                    "segmentation": encode_masks(mask)[0],
                }
            )
    return found


def by_pycocotools(
    truth: dict[str, Any], found: list[dict[str, Any]], kind: Kind
) -> tuple[dict[str, float], list[float]]:
    """The official numbers, and AP per class."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = copy.deepcopy(truth)
        for number, annotation in enumerate(coco.dataset["annotations"], 1):
            annotation["id"] = number
        coco.createIndex()
        keep = "bbox" if kind == "bbox" else "segmentation"
        results = [
            {k: d[k] for k in ("image_id", "category_id", "score", keep)} for d in copy.deepcopy(found)
        ]
        evaluation = COCOeval(coco, coco.loadRes(results), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    classes = [precision[..., k][precision[..., k] > -1] for k in range(precision.shape[2])]
    return dict(zip(NAMES, evaluation.stats, strict=False)), [
        float(c.mean()) if c.size else -1.0 for c in classes
    ]


def check_equal(truth: dict[str, Any], found: list[dict[str, Any]], kind: Kind) -> dict[str, Any]:
    before = json.dumps([truth, found])
    ours = evaluate(truth, found, kind)
    assert json.dumps([truth, found]) == before, "the arguments were changed"
    official, classes = by_pycocotools(truth, found, kind)
    for name, value in official.items():
        assert (-1.0 if ours[name] is None else ours[name]) == pytest.approx(value, abs=1e-6), name
    per_class = [-1.0 if value is None else value for value in ours["per_class"].values()]
    assert per_class == pytest.approx(classes, abs=1e-6)
    return ours


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_equal_to_pycocotools_on_shapes(kind: Kind) -> None:
    data = open_data(DetectionDataConfig(test_short_edge=96, test_size=30), training=False, seed=0)
    truth = data.ground_truth()
    ours = check_equal(truth, noisy(truth, 0), kind)
    assert 0.1 < ours["AP"] < 0.9
    assert ours["APl"] is None


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_equal_to_pycocotools_on_coco_with_crowds(kind: Kind, photos: Path) -> None:
    truth = json.loads((photos / "annotations" / "instances_val2017.json").read_bytes())
    crowded = {a["image_id"] for a in truth["annotations"] if a["iscrowd"]}
    assert crowded
    some = crowded | {image["id"] for image in truth["images"][:15]}
    truth["images"] = [image for image in truth["images"] if image["id"] in some]
    truth["annotations"] = [a for a in truth["annotations"] if a["image_id"] in some]
    ours = check_equal(truth, noisy(truth, 1), kind)
    assert all(0 < ours[name] < 1 for name in NAMES)


def test_nothing_found_and_nothing_to_find() -> None:
    data = open_data(DetectionDataConfig(test_short_edge=64, test_size=3), training=False, seed=0)
    truth = data.ground_truth()
    assert evaluate(truth, [], "bbox")["AP"] == 0
    assert evaluate({**truth, "annotations": []}, [], "bbox")["AP"] is None


def test_what_annotations_may_leave_out() -> None:
    """An area is that of the box, and the mask of a crowd is its box; boxes are judged without masks."""
    crowd = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 50, 50], "iscrowd": 1, "area": None}
    one = {"image_id": 1, "category_id": 1, "bbox": [60, 0, 20, 20]}
    polygon = [[60, 0, 80, 0, 80, 20, 60, 20]]
    truth = {
        "images": [{"id": 1, "height": 100, "width": 100}],
        "categories": [{"id": 1, "name": "a"}],
        "annotations": [crowd, {**one, "segmentation": polygon}],
    }
    (inside,) = encode_masks(np.pad(np.ones((1, 20, 20), bool), ((0, 0), (10, 70), (10, 70))))
    (exact,) = encode_masks(np.pad(np.ones((1, 20, 20), bool), ((0, 0), (0, 80), (60, 20))))
    detections = [
        {**found(1, 10, 0.9), "bbox": [10, 10, 20, 20], "segmentation": inside},
        {**found(1, 60, 0.8), "segmentation": exact},
    ]
    for kind in ("bbox", "segm"):
        assert evaluate(truth, detections, kind)["AP"] == 1  # what is found in the crowd does not count
    damaged = {"size": [1, 1], "counts": "no code"}
    truth["annotations"] = [crowd, {**one, "segmentation": damaged}]
    assert evaluate(truth, detections, "bbox")["AP"] == 1


def lvis(annotations: list[tuple[int, int]], negative: list[int], unfinished: list[int]) -> dict[str, Any]:
    """One image of 100×100 pixels; annotations are (category, x of a box of 20×20)."""
    return {
        "images": [
            {
                "id": 1,
                "height": 100,
                "width": 100,
                "neg_category_ids": negative,
                "not_exhaustive_category_ids": unfinished,
            }
        ],
        "categories": [{"id": i, "name": f"c{i}", "frequency": f} for i, f in ((1, "r"), (2, "c"), (3, "f"))],
        "annotations": [
            {"id": i, "image_id": 1, "category_id": c, "bbox": [x, 0, 20, 20], "area": 400, "iscrowd": 0}
            for i, (c, x) in enumerate(annotations, 1)
        ],
    }


def found(category: int, x: float, score: float) -> dict[str, Any]:
    return {"image_id": 1, "category_id": category, "score": score, "bbox": [x, 0, 20, 20]}


def test_lvis_counts_a_false_alarm_only_where_its_class_was_checked() -> None:
    # A better-scored false alarm halves the precision: 1/2 at every recall.
    detections = [found(1, 70, 0.9), found(1, 0, 0.8)]
    checked = evaluate(lvis([(1, 0)], [], []), detections, "bbox", "lvis")
    assert checked["AP"] == checked["APr"] == pytest.approx(0.5)
    assert checked["APc"] is None
    # In an image where not all objects of the class are marked, it is not counted at all.
    unfinished = evaluate(lvis([(1, 0)], [], [1]), detections, "bbox", "lvis")
    assert unfinished["AP"] == pytest.approx(1.0)
    # Class 2 is neither in the image nor known to be absent: whatever is found of it is not judged.
    elsewhere = lvis([(1, 0)], [], [])
    elsewhere["images"].append(elsewhere["images"][0] | {"id": 2})
    elsewhere["annotations"].append(elsewhere["annotations"][0] | {"id": 9, "image_id": 2, "category_id": 2})
    seen = [found(1, 0, 0.8), found(2, 0, 0.9), found(2, 0, 0.7) | {"image_id": 2}]
    assert evaluate(elsewhere, seen, "bbox", "lvis")["APc"] == pytest.approx(1.0)
    elsewhere["images"][0] = elsewhere["images"][0] | {"neg_category_ids": [2]}
    assert evaluate(elsewhere, seen, "bbox", "lvis")["APc"] == pytest.approx(0.5)


def test_lvis_means_over_its_three_groups() -> None:
    truth = lvis([(1, 0), (2, 0), (3, 0)], [], [])
    scores = evaluate(truth, [found(1, 0, 0.9), found(2, 5, 0.9)], "bbox", "lvis")
    # IoU of boxes moved by 5 of 20: 15/25 = 0.6, found at 3 of the 10 thresholds.
    assert scores["APr"] == pytest.approx(1.0)
    assert scores["APc"] == pytest.approx(0.3)
    assert scores["APf"] == 0
    assert scores["AP"] == pytest.approx(1.3 / 3)
    assert scores["per_class"] == pytest.approx({"c1": 1.0, "c2": 0.3, "c3": 0.0})


def test_lvis_judges_three_hundred_detections_of_an_image() -> None:
    truth = lvis([(1, 0)], [], [])
    others = [found(2, 70, 0.9)] * 300
    assert evaluate(truth, [*others[:299], found(1, 0, 0.5)], "bbox", "lvis")["APr"] == pytest.approx(1.0)
    assert evaluate(truth, [*others, found(1, 0, 0.5)], "bbox", "lvis")["APr"] == 0
