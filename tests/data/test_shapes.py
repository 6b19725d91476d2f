"""The drawn data set: pure, balanced, fair (no shortcut to the class), and its boxes and masks are true."""

import hashlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier

from momentum2.data import shapes


def test_every_image_is_a_pure_function_of_its_index() -> None:
    size = 20
    indices = np.array([7, 123456, 0, 3, 2**40, 3])
    together = shapes.render(indices, size, seed=5, split="test")
    assert together.dtype == np.uint8
    assert together.shape == (6, size, size, 3)
    among_many = shapes.render(np.arange(400), size, seed=5, split="test")
    scenes = shapes.render_scene(indices, size)
    for place, index in enumerate(indices):
        alone = shapes.render(np.array([index]), size, seed=5, split="test")[0]
        np.testing.assert_array_equal(together[place], alone)
        np.testing.assert_array_equal(scenes[place], shapes.render_scene(np.array([index]), size)[0])
        if index < 400:
            np.testing.assert_array_equal(among_many[index], alone)


def test_seed_split_and_index_each_change_the_image() -> None:
    one = np.array([1])
    variants = [
        shapes.render(one, 16),
        shapes.render(one, 16, seed=1),
        shapes.render(one, 16, seed=2**32),
        shapes.render(one, 16, split="test"),
        shapes.render(np.array([2]), 16),
        shapes.render_scene(one, 16),
    ]
    assert len({v.tobytes() for v in variants}) == len(variants)


def test_another_process_draws_the_same_bytes() -> None:
    code = (
        "import hashlib, numpy as np; from momentum2.data import shapes;"
        "print(hashlib.sha256(shapes.render(np.arange(50), 24, seed=9).tobytes()).hexdigest())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = hashlib.sha256(shapes.render(np.arange(50), 24, seed=9).tobytes()).hexdigest()
    assert other.strip() == here


def test_labels_are_balanced_and_not_periodic() -> None:
    labels = shapes.labels(np.arange(2000))
    assert labels.dtype == np.int64
    assert (np.sort(labels.reshape(-1, 10), axis=1) == np.arange(10)).all()
    assert len({tuple(block) for block in labels.reshape(-1, 10)}) > 30  # of the 40 orders a·i + b
    assert len(shapes.CLASS_NAMES) == len(set(shapes.CLASS_NAMES)) == 10
    shuffled = np.array([1999, 3, 10])
    np.testing.assert_array_equal(shapes.labels(shuffled), labels[shuffled])


def test_the_same_image_at_two_sizes_shows_the_same_thing() -> None:
    indices = np.arange(40)
    small = shapes.render(indices, 24).astype(float)
    large = shapes.render(indices, 96).astype(float)
    shrunk = large.reshape(40, 24, 4, 24, 4, 3).mean((2, 4))
    for a, b in zip(small, shrunk, strict=True):
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.9


def test_no_images_are_an_empty_array() -> None:
    none = np.arange(0)
    assert shapes.render(none, 16).shape == (0, 16, 16, 3)
    assert shapes.render_scene(none, 16).shape == (0, 16, 16, 3)
    assert shapes.labels(none).shape == (0,)
    assert shapes.annotations(none, 16) == []


def plain_inside(shape: str, u: float, v: float) -> bool:
    """The shapes by plain geometry, in radii."""
    if shape == "disc":
        return u**2 + v**2 <= 0.86**2
    assert shape == "cross"
    return (abs(u) <= 0.34 and abs(v) <= 0.95) or (abs(v) <= 0.34 and abs(u) <= 0.95)


@pytest.mark.parametrize("number", range(len(shapes.SHAPES)))
def test_each_shape_is_what_its_name_says(number: int) -> None:
    points = np.random.default_rng(number).uniform(-1.3, 1.3, (1500, 2)).astype(np.float32)
    depth = shapes._DEPTH[number](points[:, 0], points[:, 1])
    clear = np.abs(depth) > 2e-3
    expected = [plain_inside(shapes.SHAPES[number], u, v) for u, v in points.astype(float)]
    np.testing.assert_array_equal(depth[clear] > 0, np.array(expected)[clear])
    assert 0.05 < np.mean(expected) < 0.6


@pytest.mark.parametrize(
    ("texture", "inked"),
    [
        ("striped", lambda x, y: 0.25 <= x % 1 <= 0.75),
        ("dotted", lambda x, y: (x % 1 - 0.5) ** 2 + (y % 1 - 0.5) ** 2 <= 0.16),
        ("checked", lambda x, y: (0.25 <= x % 1 <= 0.75) == (0.25 <= y % 1 <= 0.75)),
        ("waved", lambda x, y: 0.25 <= (x + 0.8 * abs((0.6 * y) % 1 - 0.5)) % 1 <= 0.75),
        ("plain", lambda x, y: False),
    ],
)
def test_each_texture_is_what_its_name_says(texture: str, inked: Callable[[float, float], bool]) -> None:
    points = np.random.default_rng(1).uniform(-3, 3, (2, 1, 30, 30)).astype(np.float32)
    one = np.ones(1, np.float32)
    sharp = 1e5 * one  # pixels per radius: edges of no width
    kind = np.array([shapes.TEXTURES.index(texture)])
    drawn = shapes._texture(kind, points[0], points[1], one, np.zeros((2, 1), np.float32), sharp)
    expected = [inked(float(x), float(y)) for x, y in points.reshape(2, -1).T]
    assert np.mean((drawn.ravel() > 0.5) == expected) > 0.999
    assert texture == "plain" or 0.4 < np.mean(expected) < 0.6


def test_annotations_mark_what_differs_from_the_background() -> None:
    size, indices = 72, np.arange(60)
    images = shapes.render_scene(indices, size).astype(int)
    found = shapes.annotations(indices, size)
    background = shapes._background(shapes._Draws(0, "train"), indices, size)
    background = (background * 255 + 0.5).astype(np.uint8).transpose(0, 2, 3, 1)
    counts = set()
    for image, behind, seen in zip(images, background, found, strict=True):
        boxes, masks = seen["boxes"], seen["masks"]
        counts.add(len(boxes))
        assert len(boxes) == len(masks) == len(seen["labels"])
        assert masks.sum(0).max() == 1  # no pixel belongs to two objects
        changed = np.abs(image - behind).max(-1) > 8
        assert not (changed & ~_grown(masks.any(0))).any()  # outside: the background, untouched
        assert changed[masks.any(0)].mean() > 0.9
        for (x1, y1, x2, y2), mask in zip(boxes, masks, strict=True):
            y, x = np.nonzero(mask)
            assert (x1, y1, x2, y2) == (x.min(), y.min(), x.max() + 1, y.max() + 1)
            assert 8 <= max(x2 - x1, y2 - y1) <= 0.6 * size
    assert counts == {1, 2, 3, 4}


def _grown(mask: np.ndarray, by: int = 4) -> np.ndarray:
    """Larger in every direction: a star's sharp, softened tip ends some pixels beyond the mask."""
    padded = np.pad(mask, by)
    steps = range(2 * by + 1)
    return np.max([padded[y : y + len(mask), x : x + len(mask)] for y in steps for x in steps], 0)


def test_there_is_no_linear_shortcut_to_the_class() -> None:
    train, test = np.arange(6000), np.arange(2000)
    seen = {split: shapes.render(i, 16, split=split) for split, i in (("train", train), ("test", test))}
    behind = {
        split: shapes._background(shapes._Draws(0, split), i, 16)
        for split, i in (("train", train), ("test", test))
    }
    y, y_test = shapes.labels(train), shapes.labels(test, split="test")
    features = {
        "raw pixels": [seen[s].reshape(len(seen[s]), -1) / 255 for s in ("train", "test")],
        "mean color": [seen[s].mean((1, 2)) / 255 for s in ("train", "test")],
        "background": [behind[s].reshape(len(behind[s]), -1) for s in ("train", "test")],
    }
    for name, (a, b) in features.items():
        accuracy = (RidgeClassifier(alpha=30.0).fit(a, y).predict(b) == y_test).mean()
        assert accuracy < 0.15, (name, accuracy)
