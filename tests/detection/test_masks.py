"""Targets, pooling and pasting fit together: perfect boxes and masks come out as they went in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from momentum2.detection.coco_eval import evaluate
from momentum2.detection.data import DetectionData, open_data
from momentum2.detection.masks import mask_targets, paste
from momentum2.detection.pool import Pool
from momentum2.detection.predict import to_coco
from momentum2.detection.presets import DetectionDataConfig
from momentum2.detection.targets import Detections
from momentum2.detection.transforms import Draw, flip, scaled_size, training_view


def perfect(data: DetectionData, short_edge: int, max_long_edge: int) -> list[dict[str, Any]]:
    """What a detector would find that has learned its targets exactly."""
    found = []
    for i in range(len(data.image_ids)):
        image, truth = data.image(i), data.target(i, masks=True)
        height, width = image.shape[1:]
        view, target = training_view(image, truth, Draw(short_edge, False), max_long_edge)
        objects = torch.arange(len(target["boxes"]))
        squares = mask_targets(target["masks"], target["boxes"], objects, 28, view.shape[1:])  # type: ignore[arg-type]
        size = scaled_size(height, width, short_edge, max_long_edge)
        boxes = target["boxes"] * torch.tensor([width / size[1], height / size[0]]).repeat(2)
        result = Detections(
            boxes=boxes,
            labels=truth["labels"],
            scores=torch.ones(len(boxes)),
            masks=paste(squares, boxes, height, width),
        )
        found += to_coco(result, data.image_ids[i], data.category_ids)
    return found


def test_perfect_masks_of_shapes_score_all_points() -> None:
    data = open_data(DetectionDataConfig(test_short_edge=80, test_size=50), training=False, seed=0)
    found = perfect(data, 80, 160)
    truth = data.ground_truth()
    assert evaluate(truth, found, "segm")["AP"] >= 0.995
    assert evaluate(truth, found, "bbox")["AP"] >= 0.995


def test_perfect_masks_of_photos_score_all_points(photos: Path) -> None:
    config = DetectionDataConfig(name="coco", root=str(photos), test_split="val2017", test_size=20)
    data = open_data(config, training=False, seed=0, masks=True)
    found = perfect(data, 800, 1333)
    truth = data.ground_truth()
    truth["annotations"] = [a for a in truth["annotations"] if not a.get("iscrowd")]
    assert evaluate(truth, found, "segm")["AP"] >= 0.995


@pytest.mark.parametrize("samples", [0, 2])
def test_pooling_finds_the_middle_of_each_bin_on_every_level(samples: int) -> None:
    """Maps whose values are the x and y of the middle of their cells."""
    strides = [4, 8, 16, 32]
    maps = []
    for stride in strides:
        cells = (torch.arange(1024 // stride) + 0.5) * stride
        maps.append(torch.stack(torch.meshgrid(cells, cells, indexing="xy"))[None])
    boxes = torch.tensor(
        [
            [100.0, 200.0, 150.3, 240.0],
            [100.0, 200.0, 250.0, 320.5],
            [90.0, 80.0, 400.0, 300.0],
            [64, 64, 700, 900],
        ]
    )
    pool = Pool(strides, 7, samples)
    assert pool.levels(boxes).tolist() == [0, 1, 2, 3]
    squares = pool(maps, [boxes])
    for box, square in zip(boxes, squares, strict=True):
        bins = (torch.arange(7) + 0.5) / 7
        x, y = box[0] + bins * (box[2] - box[0]), box[1] + bins * (box[3] - box[1])
        torch.testing.assert_close(square[0], x[None].expand(7, 7), atol=1e-3, rtol=1e-5)
        torch.testing.assert_close(square[1], y[:, None].expand(7, 7), atol=1e-3, rtol=1e-5)


def test_the_level_of_a_box_is_that_of_its_area() -> None:
    side = torch.tensor([10.0, 111.9, 112.0, 223.9, 224.0, 447.9, 448.0, 2000.0])
    boxes = torch.stack((torch.zeros(8), torch.zeros(8), side * 2, side / 2), 1)
    assert Pool([4, 8, 16, 32], 7, 2).levels(boxes).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert Pool([4], 7, 2).levels(boxes[:1] * 0).tolist() == [0]


def test_boxes_are_pooled_from_their_own_image() -> None:
    level = torch.stack([torch.full((3, 20, 20), 1.0), torch.full((3, 20, 20), 2.0)])
    box = torch.tensor([[8.0, 8.0, 40.0, 40.0]])
    squares = Pool([4], 7, 2)([level], [box[:0], torch.cat((box, box))])
    assert squares.shape == (2, 3, 7, 7)
    torch.testing.assert_close(squares, torch.full_like(squares, 2.0))
    assert Pool([4], 7, 2)([level], [box[:0], box[:0]]).shape == (0, 3, 7, 7)


def mask_of(rows: slice, columns: slice, height: int = 40, width: int = 60) -> Tensor:
    mask = torch.zeros(1, height, width, dtype=torch.bool)
    mask[0, rows, columns] = True
    return mask


def test_a_mask_of_one_row_survives() -> None:
    mask = mask_of(slice(10, 11), slice(5, 50))
    box = torch.tensor([[5.0, 10.0, 50.0, 11.0]])
    squares = mask_targets(mask, box * 2, torch.tensor([0]), 28, (80, 120))
    assert torch.equal(paste(squares, box, 40, 60), mask)


def test_targets_are_the_covered_share_of_each_bin() -> None:
    # A box of 8×8 pixels in 4 bins a side; the object covers the left 5 columns: two bins and half of the third.
    squares = mask_targets(
        mask_of(slice(8, 16), slice(8, 13)), torch.tensor([[8.0, 8, 16, 16]]), torch.tensor([0]), 4, (40, 60)
    )
    torch.testing.assert_close(squares[0], torch.tensor([1.0, 1.0, 0.5, 0.0]).expand(4, 4))


def test_targets_do_not_depend_on_the_size_that_the_image_is_shown_at() -> None:
    mask, box, one = (
        mask_of(slice(3, 30), slice(9, 41)),
        torch.tensor([[5.0, 2.0, 44.0, 33.0]]),
        torch.tensor([0]),
    )
    scale = torch.tensor([200 / 60, 80 / 40]).repeat(2)
    torch.testing.assert_close(
        mask_targets(mask, box * scale, one, 28, (80, 200)), mask_targets(mask, box, one, 28, (40, 60))
    )


def test_flips_and_targets_commute() -> None:
    mask = mask_of(slice(3, 30), slice(9, 41))
    mask[0, 10:20, 30:50] = True
    target = {"boxes": torch.tensor([[9.0, 3.0, 50.0, 30.0]]), "labels": torch.tensor([0]), "masks": mask}
    one = torch.tensor([0])
    straight = mask_targets(mask, target["boxes"], one, 28, (40, 60))
    _, mirrored = flip(torch.zeros(3, 40, 60), target)  # type: ignore[arg-type]
    after = mask_targets(mirrored["masks"], mirrored["boxes"], one, 28, (40, 60))
    torch.testing.assert_close(after, straight.flip(2), atol=1e-5, rtol=0)


def test_boxes_without_area_or_outside_have_no_mask() -> None:
    boxes = torch.tensor([[5.0, 5, 5, 9], [-20, -20, -2, -2], [70, 5, 80, 9], [-4, -4, 4, 4.0]])
    pasted = paste(torch.ones(4, 28, 28), boxes, 40, 60)
    assert pasted.sum((1, 2)).tolist() == [0, 0, 0, 16]
    assert paste(torch.ones(0, 28, 28), boxes[:0], 40, 60).shape == (0, 40, 60)
