"""Annotation files: every form of mask, and everything that can be wrong with them."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from momentum2.detection.coco import CocoData
from momentum2.detection.data import open_data
from momentum2.detection.presets import DetectConfig, DetectionDataConfig
from momentum2.detection.schedule import check
from momentum2.detection.targets import decode_masks, encode_masks
from momentum2.errors import UserError

SQUARE = [2.0, 1.0, 6.0, 1.0, 6.0, 5.0, 2.0, 5.0]  # x 2 to 6, y 1 to 5


def object_(image: int, category: int, bbox: list[float], **more: Any) -> dict[str, Any]:
    return {
        "id": 1,
        "image_id": image,
        "category_id": category,
        "bbox": bbox,
        "area": bbox[2] * bbox[3],
        **more,
    }


def content(**changes: Any) -> dict[str, Any]:
    return {
        "images": [{"id": i, "file_name": f"{i}.png", "height": 8, "width": 10} for i in (7, 3)],
        "categories": [{"id": 90, "name": "bird"}, {"id": 5, "name": "ant"}],
        "annotations": [object_(3, 90, [2, 1, 4, 4], segmentation=[SQUARE])],
        **changes,
    }


def write(
    root: Path, values: dict[str, Any], name: str = "instances_train.json", folder: str = "train"
) -> Path:
    (root / "annotations").mkdir(exist_ok=True)
    (root / folder).mkdir(exist_ok=True)
    for i in (3, 7):
        Image.fromarray(np.full((8, 10, 3), i, np.uint8)).save(root / folder / f"{i}.png")
    path = root / "annotations" / name
    path.write_text(json.dumps(values))
    return path


def load(root: Path, training: bool = False, **changes: Any) -> CocoData:
    return CocoData(write(root, content(**changes)), root / "train", training=training)


def test_images_and_classes_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    data = load(tmp_path)
    assert data.image_ids == (3, 7)
    assert data.class_names == ("ant", "bird")
    assert data.category_ids == (5, 90)
    image = data.image(1)
    assert image.shape == (3, 8, 10)
    assert image.dtype == torch.uint8
    assert set(image.unique().tolist()) == {7}
    target = data.target(0, masks=True)
    assert target["boxes"].tolist() == [[2, 1, 6, 5]]
    assert target["labels"].tolist() == [1]
    expected = torch.zeros(8, 10, dtype=torch.bool)
    expected[1:5, 2:6] = True
    assert torch.equal(target["masks"][0], expected)


def test_all_forms_of_a_mask_are_the_same() -> None:
    mask = torch.zeros(8, 10, dtype=torch.bool)
    mask[1:5, 2:6] = True
    # Run lengths go down the columns: two empty columns and a pixel, then four of eight, four times.
    counts = [17, 4, 4, 4, 4, 4, 4, 4, 35]
    (compressed,) = encode_masks(mask[None])
    forms = [[SQUARE], {"size": [8, 10], "counts": counts}, compressed]
    for found in decode_masks(forms, 8, 10):
        assert torch.equal(found, mask)
    assert json.loads(json.dumps(compressed)) == compressed
    halves = [[2.0, 1.0, 4.0, 1.0, 4.0, 5.0, 2.0, 5.0], [4.0, 1.0, 6.0, 1.0, 6.0, 5.0, 4.0, 5.0]]
    assert torch.equal(decode_masks([halves], 8, 10)[0], mask)
    assert decode_masks([], 8, 10).shape == (0, 8, 10)
    assert encode_masks(torch.zeros(0, 8, 10)) == []


def test_crowds_are_not_learned_but_stay_in_the_ground_truth(tmp_path: Path) -> None:
    crowd = object_(3, 5, [0, 0, 5, 5], iscrowd=1, segmentation={"size": [8, 10], "counts": [0, 80]})
    data = load(tmp_path, annotations=[crowd, object_(3, 90, [2, 1, 4, 4], segmentation=[SQUARE])])
    assert data.target(0, masks=True)["labels"].tolist() == [1]
    assert data.classes(0) == {1}
    assert len(data.ground_truth()["annotations"]) == 2


def test_boxes_are_clipped_and_empty_ones_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    boxes = [[-2, 1, 5, 4], [3, 3, 0, 2], [12, 1, 3, 3], [8, 6, 9, 9], [7, 3, 1e-7, 2]]
    line = object_(3, 5, [2, 1, 4, 4], segmentation=[[2, 1, 6, 5]])
    with caplog.at_level(logging.WARNING):
        data = load(tmp_path, annotations=[line, *(object_(3, 5, box, segmentation=[]) for box in boxes)])
    assert data.target(0, masks=False)["boxes"].tolist() == [[0, 1, 3, 5], [8, 6, 10, 8]]
    assert "4 objects whose box or outline is empty" in caplog.text


def test_images_without_objects(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = load(tmp_path).target(1, masks=True)
    assert target["boxes"].shape == (0, 4)
    assert target["labels"].shape == (0,)
    assert target["masks"].shape == (0, 8, 10)
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, training=True).image_ids == (3,)
    assert "1 images that show nothing to learn" in caplog.text
    with pytest.raises(UserError, match="no image with an object"):
        load(tmp_path, training=True, annotations=[])


def test_objects_of_images_that_are_not_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(tmp_path, annotations=[object_(image, 5, [2, 1, 4, 4]) for image in (3, 4, 4)])
    assert "ignoring 2 objects of images that it does not list" in caplog.text


def test_missing_images_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, content())
    (tmp_path / "train" / "7.png").unlink()
    with pytest.raises(UserError, match=r"1 of the 2 images .* missing, such as .*7\.png"):
        CocoData(path, tmp_path / "train")
    with pytest.raises(UserError, match="2 of the 2"):
        CocoData(path, tmp_path / "elsewhere")


def test_unreadable_and_wrong_images_are_named(tmp_path: Path) -> None:
    data = load(tmp_path)
    (tmp_path / "train" / "3.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"3\.png cannot be read"):
        data.image(0)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "train" / "7.png")
    with pytest.raises(UserError, match=r"7\.png is 4×4 pixels, not 10×8"):
        data.image(1)


def test_objects_without_masks_need_another_model(tmp_path: Path) -> None:
    data = load(tmp_path, annotations=[object_(3, 5, [2, 1, 4, 4])])
    assert len(data.target(0, masks=False)["boxes"]) == 1
    assert data.aspect(0) == 1.25
    with pytest.raises(
        UserError, match=r"model needs masks, but .*train.json has .*3\.png.* Choose faster_rcnn"
    ):
        CocoData(data.source, data.folder, masks=True)  # before anything is trained
    CocoData(write(tmp_path, content()), data.folder, masks=True)


def test_a_mask_of_another_size_is_refused(tmp_path: Path) -> None:
    wrong = {"size": [10, 8], "counts": [17, 4, 4, 4, 4, 4, 4, 4, 35]}
    for crowd in (0, 1):  # evaluation needs those of crowds
        with pytest.raises(
            UserError, match=r"train.json has a mask of \[10, 8\] pixels in image 3, which has \[8, 10\]"
        ):
            load(tmp_path, annotations=[object_(3, 5, [2, 1, 4, 4], segmentation=wrong, iscrowd=crowd)])


@pytest.mark.parametrize("counts", [[0, 79], [0, 81], [-1, 81], ["a"], [], "", "damaged", None])
@pytest.mark.parametrize("crowd", [0, 1])
def test_a_code_that_cannot_be_decoded_is_found_before_the_training(
    tmp_path: Path, counts: object, crowd: int
) -> None:
    code = {"size": [8, 10], "counts": counts}
    damaged = object_(3, 5, [2, 1, 4, 4], segmentation=code, iscrowd=crowd)
    data = load(tmp_path, annotations=[damaged])  # boxes do not need it
    with pytest.raises(
        UserError, match=r"train.json has a run-length code in image 3 that cannot be decoded"
    ):
        CocoData(data.source, data.folder, masks=True)


def test_polygons_without_an_area_are_left_out(tmp_path: Path) -> None:
    odd = [2.0, 1.0, 6.0, 1.0, 6.0, 5.0, 2.0]
    data = load(tmp_path, annotations=[object_(3, 5, [2, 1, 4, 4], segmentation=[odd, SQUARE, [], [1, 2]])])
    assert data.target(0, masks=True)["masks"].sum() == 16
    assert not load(tmp_path, annotations=[object_(3, 5, [2, 1, 4, 4], segmentation=[odd])]).classes(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not an annotation file"),
        ("[]", "not an annotation file"),
        ('{"images": []}', "not an annotation file"),
        (json.dumps(content(annotations=[{"image_id": 3}])), "lacks 'bbox'"),
        (json.dumps(content(annotations=[object_(3, 4, [0, 0, 1, 1])])), "category 4 without listing it"),
        (
            json.dumps(content()).replace('"image_id": 3', '"image_id": "3"'),
            "'image_id' .* is '3', not a whole number",
        ),
        (
            json.dumps(content(annotations=[object_(3, 90, [0, 0, 1, 1]) | {"bbox": [0, 0, 1]}])),
            "a 'bbox' is ",
        ),
        (
            json.dumps(content(annotations=[object_(3, 90, [0, 0, 1, 1], segmentation="x")])),
            "neither polygons nor",
        ),
        (
            json.dumps(content(annotations=[object_(3, 90, [0, 0, 1, 1], segmentation={"size": [8, 10]})])),
            "neither polygons nor",
        ),
        *(
            (
                json.dumps(content(annotations=[object_(3, 90, [0, 0, 1, 1], segmentation=[polygon])])),
                "neither polygons nor",
            )
            for polygon in (
                *([1, 1, 5, 1, 5, float("nan")], [1, 1, 5, 1, 5, float("-inf")], [1, 1, 5, 1, 5, -1e9]),
                *([1, 1, 5, 1, 5, 1e30], [1, 1, 5, 1, 5, "5"], [[1, 1], [5, 1], [5, 5]]),
            )
        ),
        *(
            (
                json.dumps(content(annotations=[object_(3, 90, [0, 0, 1, value])])),
                "a 'bbox' is .*, not x, y, w, h",
            )
            for value in (float("nan"), float("inf"))
        ),
        (
            json.dumps(content(annotations=[object_(3, 90, [0, 0, 1, 1], iscrowd="no")])),
            "an 'iscrowd' is 'no', not 0 or 1",
        ),
        (
            json.dumps(content(annotations=[object_(3, 90, [0, 0, 1, 1]) | {"area": "big"}])),
            "an 'area' is 'big', not a number",
        ),
        (
            json.dumps(content()).replace('"height": 8', '"height": 0'),
            "'height' of an entry of 'images' is 0",
        ),
        (json.dumps(content()).replace('"id": 7', '"id": 3'), "'images' has the id 3 twice"),
        (json.dumps(content()).replace('"id": 5', '"id": 90'), "'categories' has the id 90 twice"),
    ],
)
def test_damaged_annotation_files(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, content())
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        CocoData(path, tmp_path / "train")


def test_a_seeded_subset(tmp_path: Path) -> None:
    path = write(tmp_path, content())
    picked = {CocoData(path, tmp_path / "train", count=1, seed=seed).image_ids for seed in range(8)}
    assert picked == {(3,), (7,)}
    assert CocoData(path, tmp_path / "train", count=5).image_ids == (3, 7)
    one = CocoData(path, tmp_path / "train", count=1)
    assert [a["image_id"] for a in one.ground_truth()["annotations"]] in ([3], [])


def test_lvis_finds_its_images_in_cocos_folders(tmp_path: Path) -> None:
    classes = [{"id": 5, "name": "ant", "frequency": "r"}, {"id": 90, "name": "bird", "frequency": "f"}]
    old = content(
        categories=classes,
        images=[{"id": 3, "file_name": "COCO_val2014_000000000003.jpg", "height": 8, "width": 10}],
    )
    new = content(
        categories=classes,
        images=[
            {"id": 3, "coco_url": "http://images.cocodataset.org/val2017/3.png", "height": 8, "width": 10}
        ],
    )
    write(tmp_path, old, "lvis_v0.5_train.json", "train2017")
    write(tmp_path, new, "lvis_v1_train.json", "val2017")
    Image.fromarray(np.full((8, 10, 3), 9, np.uint8)).save(tmp_path / "train2017" / "000000000003.jpg")
    config = DetectionDataConfig(name="lvis", root=str(tmp_path), split="v0.5_train")
    assert open_data(config, training=True, seed=0).image(0).float().mean() == pytest.approx(9, abs=1)
    config = DetectionDataConfig(name="lvis", root=str(tmp_path), split="v1_train")
    assert open_data(config, training=True, seed=0).image(0).float().mean() == 3


def test_lvis_needs_to_know_how_frequent_classes_are(tmp_path: Path) -> None:
    config = DetectionDataConfig(name="lvis", root=str(tmp_path), split="v1_train")
    for more in ({}, {"frequency": "often"}):
        categories = [{**category, **more} for category in content()["categories"]]
        write(tmp_path, content(categories=categories), "lvis_v1_train.json", "train2017")
        with pytest.raises(UserError, match="how frequent its classes are"):
            open_data(config, training=True, seed=0)


def test_where_the_data_are_not(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.root is required"):
        open_data(DetectionDataConfig(name="coco"), training=True, seed=0)
    with pytest.raises(UserError, match="is not a folder"):
        open_data(DetectionDataConfig(name="coco", root=str(tmp_path / "no")), training=True, seed=0)
    with pytest.raises(UserError, match=r"instances_train\.json cannot be read"):
        open_data(DetectionDataConfig(name="coco", root=str(tmp_path)), training=True, seed=0)
    with pytest.raises(UserError, match="test_size must be at least 1"):
        check(DetectConfig(data=DetectionDataConfig(test_size=0)))


def test_shapes_have_boxes_masks_and_ground_truth() -> None:
    data = open_data(DetectionDataConfig(test_short_edge=64, test_size=5), training=False, seed=0)
    truth = data.ground_truth()
    assert len(data.image_ids) == 5
    for i in range(5):
        target = data.target(i, masks=True)
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            rows, columns = mask.nonzero().unbind(1)
            around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert box.tolist() == [int(v) for v in around]
        entries = [a for a in truth["annotations"] if a["image_id"] == i]
        assert torch.equal(decode_masks([a["segmentation"] for a in entries], 64, 64), target["masks"])
        assert [a["area"] for a in entries] == target["masks"].sum((1, 2)).tolist()
        assert data.image(i).shape == (3, 64, 64)
        assert data.classes(i) == set(target["labels"].tolist())
