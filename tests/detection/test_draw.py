"""Pictures of detections, pixel by pixel."""

import numpy as np
import torch

from momentum2.detection.pictures import _COLORS, draw, grid
from momentum2.detection.targets import Detections


def found(scores: list[float]) -> Detections:
    """A box with a mask that covers its lower half, for each score."""
    mask = torch.zeros(len(scores), 40, 40, dtype=torch.bool)
    mask[:, 20:30, 10:30] = True
    return Detections(
        boxes=torch.tensor([[10.0, 10.0, 30.0, 30.0]] * len(scores)).reshape(-1, 4),
        labels=torch.arange(len(scores)),
        scores=torch.tensor(scores),
        masks=mask,
    )


def test_box_and_mask_lie_where_they_are() -> None:
    picture = np.asarray(draw(torch.full((3, 40, 40), 200, dtype=torch.uint8), found([0.9]), ["cat"]))
    assert picture.shape == (320, 320, 3)  # 8 times as large: everything lies at 8 times its place
    color = np.array(_COLORS[0])
    assert (picture[80, 200:240] == color).all()
    assert (picture[239, 80:240] == color).all()
    assert (picture[80:240, 239] == color).all()
    assert (picture[100:150, 100:200] == 200).all()
    assert (picture[170:230, 100:200] == (200 * 0.55 + color * 0.45).astype(np.uint8)).all()
    assert (picture[250:] == 200).all()


def test_what_is_unlikely_is_not_drawn() -> None:
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    assert not np.asarray(draw(image, found([0.2]), ["cat"])).any()
    both = np.asarray(draw(image, found([0.9, 0.4]), ["cat", "dog"]))
    assert (both[239, 80:240] == _COLORS[0]).all()  # the better one is on top


def test_words_stay_inside_the_picture() -> None:
    narrow = found([0.9])
    narrow["boxes"] = torch.tensor([[38.0, 20.0, 40.0, 30.0]])
    picture = np.asarray(draw(torch.zeros(3, 40, 40, dtype=torch.uint8), narrow, ["baseball glove"]))
    background = (
        (picture[150:160] == _COLORS[0]).all(2).any(0).nonzero()[0]
    )  # columns of the label, above the box
    assert background.min() < 300  # it begins left of the box at 304


def test_pictures_side_by_side() -> None:
    picture = draw(torch.zeros(3, 40, 60, dtype=torch.uint8), found([]), [])
    assert picture.size == (480, 320)
    assert grid([picture] * 5).size == (4 * 488 + 8, 2 * 328 + 8)
    assert grid([picture] * 2).size == (2 * 488 + 8, 328 + 8)


def test_a_box_without_area_is_a_line() -> None:
    flat = found([0.9])
    flat["boxes"] = torch.tensor([[10.0, 10.0, 10.0, 30.0]])
    picture = np.asarray(draw(torch.zeros(3, 40, 40, dtype=torch.uint8), flat, ["cat"]))
    assert (picture[100:200, 80] == _COLORS[0]).all()
