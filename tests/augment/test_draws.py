"""Draws: their distributions, and that they depend on nothing but (seed, step, view, sample)."""

import math
from dataclasses import fields

import pytest
import torch

from momentum2.augment import Draws, ViewSpec, crop_boxes, draw

N = 40_000
SPEC = ViewSpec(
    size=224,
    area=(0.08, 1.0),
    jitter=(0.4, 0.3, 0.2, 0.1),
    jitter_p=0.8,
    gray_p=0.2,
    blur_p=0.5,
    blur_kernel=23,
    solarize_p=0.1,
    vertical_flip_p=0.3,
    rotate90_p=0.6,
    channel_drop_p=0.15,
)


@pytest.fixture(scope="module")
def draws() -> Draws:
    return draw(SPEC, seed=0, step=0, view=0, count=N)


def same(a: Draws, b: Draws) -> bool:
    return all(torch.equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(Draws))


def assert_uniform(values: torch.Tensor, low: float, high: float) -> None:
    """Kolmogorov–Smirnov: chance exceeds this distance less than once in ten thousand."""
    assert values.min() >= low
    assert values.max() <= high
    cdf = (values.double().sort().values - low) / (high - low)
    distance = (cdf - (torch.arange(len(values)) + 0.5) / len(values)).abs().max()
    assert distance < 2.23 / math.sqrt(len(values))


@pytest.mark.parametrize(
    ("name", "probability"),
    [("flip", 0.5), ("jitter", 0.8), ("gray", 0.2), ("blur", 0.5), ("solarize", 0.1)],
)
def test_probabilities(draws, name, probability):
    share = getattr(draws, name).double().mean()
    assert abs(share - probability) < 4 * math.sqrt(probability * (1 - probability) / N)


@pytest.mark.parametrize("name", ["flip", "jitter", "gray", "blur", "solarize"])
def test_certain_and_impossible(name):
    for p in (0.0, 1.0):
        spec = ViewSpec(32, **{f"{other}_p": p for other in ("flip", "jitter", "gray", "blur", "solarize")})
        assert (getattr(draw(spec, 0, 0, 0, 1000), name) == bool(p)).all()


@pytest.mark.parametrize(
    ("name", "probability", "values"),
    [("vertical", 0.3, [1]), ("turns", 0.6, [1, 2, 3]), ("dropped", 0.15, [0, 1, 2])],
)
def test_the_last_three_numbers(draws, name, probability, values):
    found = getattr(draws, name).long()
    for value in values:  # all alike, though one number decides both whether and which
        share, p = (found == value).double().mean(), probability / len(values)
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / N)
    off = draw(ViewSpec(32), 0, 0, 0, 1000)
    assert (off.vertical == 0).all()
    assert (off.turns == 0).all()
    assert (off.dropped == -1).all()
    on = draw(ViewSpec(32, vertical_flip_p=1.0, rotate90_p=1.0, channel_drop_p=1.0), 0, 0, 0, 1000)
    assert on.vertical.all()
    assert on.turns.min() == 1
    assert on.dropped.min() == 0


def test_new_operations_move_no_old_draw(draws):
    """Each decision has its own number, so a run without them draws what it always drew."""
    from dataclasses import replace

    off = draw(replace(SPEC, vertical_flip_p=0.0, rotate90_p=0.0, channel_drop_p=0.0), 0, 0, 0, N)
    for field in fields(Draws):
        if field.name not in ("vertical", "turns", "dropped"):
            assert torch.equal(getattr(off, field.name), getattr(draws, field.name)), field.name


def test_ranges(draws):
    for column, (low, high) in enumerate([(0.6, 1.4), (0.7, 1.3), (0.8, 1.2), (-0.1, 0.1)]):
        assert_uniform(draws.factors[:, column], low - 1e-6, high + 1e-6)
    assert_uniform(draws.sigma, 0.1 - 1e-6, 2 + 1e-6)
    assert_uniform(draws.area[:, 0], 0.08, 1)
    assert_uniform(draws.ratio[:, 0].log(), math.log(3 / 4), math.log(4 / 3))


def test_strong_jitter_never_goes_below_zero():
    factors = draw(ViewSpec(32, jitter=(1.5, 1.5, 1.5, 0.5), jitter_p=1.0), 0, 0, 0, 1000).factors
    assert_uniform(factors[:, 0], 0, 2.5)


def test_every_order_is_equally_likely(draws):
    assert torch.equal(draws.order.sort(1).values, torch.arange(4).expand(N, 4))
    counts = (draws.order @ torch.tensor([64, 16, 4, 1])).bincount()
    counts = counts[counts > 0]
    assert len(counts) == 24
    chi_square = float(((counts - N / 24) ** 2 / (N / 24)).sum())
    assert chi_square < 60  # 23 degrees of freedom: p < 1e-4


def test_decisions_are_independent(draws):
    columns = torch.stack(
        [getattr(draws, name).double() for name in ("flip", "jitter", "gray", "blur", "solarize", "sigma")]
        + [*draws.factors.double().T, *draws.area.T, *draws.ratio.log().T, *draws.corner.T]
    )
    correlations = columns.corrcoef() - torch.eye(len(columns))
    assert correlations.abs().max() < 5 / math.sqrt(N)
    neighbors = torch.stack([torch.stack([c[1:], c[:-1]]).corrcoef()[0, 1] for c in columns])
    assert neighbors.abs().max() < 5 / math.sqrt(N)


def test_crop_area_and_ratio(draws):
    boxes = crop_boxes(draws, 2000, 2000)
    top, left, height, width = boxes.double().unbind(1)
    assert (boxes >= 0).all()
    assert (top + height).max() <= 2000
    assert (left + width).max() <= 2000
    ratio = width / height
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    # Small crops are never refused, so they keep the distribution of the draws.
    small = (height * width / 2000**2)[draws.area[:, 0] < 0.5]
    assert_uniform(small, 0.0798, 0.5002)
    # A crop lies uniformly in the room that is left.
    room = height < 1900
    assert_uniform(((top + 0.5) / (2001 - height))[room], 0, 1)
    assert_uniform(((left + 0.5) / (2001 - width))[width < 1900], 0, 1)


def test_boxes_follow_the_rule_written_out():
    """RandomResizedCrop for one image at a time: ten attempts, then the central crop."""
    spec = ViewSpec(32, area=(0.3, 1.0))
    own = draw(spec, 3, 4, 0, 600)
    generator = torch.Generator().manual_seed(0)
    heights, widths = torch.randint(1, 40, (2, 600), generator=generator)
    widths[::3] *= 9  # long images, for which few attempts fit
    heights[1::3] *= 9
    fallbacks = 0
    for i, box in enumerate(crop_boxes(own, heights, widths).tolist()):
        height, width = int(heights[i]), int(widths[i])
        for area, ratio in zip(own.area[i].tolist(), own.ratio[i].tolist(), strict=True):
            w = round(math.sqrt(height * width * area * ratio))
            h = round(math.sqrt(height * width * area / ratio))
            if 0 < w <= width and 0 < h <= height:
                y, x = own.corner[i].tolist()
                expected = [math.floor(y * (height - h + 1)), math.floor(x * (width - w + 1)), h, w]
                break
        else:
            fallbacks += 1
            w, h = width, height
            if width / height < 3 / 4:
                h = round(width / (3 / 4))
            elif width / height > 4 / 3:
                w = round(height * (4 / 3))
            expected = [(height - h) // 2, (width - w) // 2, h, w]
        assert box == expected
    assert fallbacks > 50


def test_evaluation_crop_is_central_and_the_same_for_all():
    own = draw(ViewSpec(224, center=224 / 256, flip_p=0), 1, 2, 0, 3)
    sizes = torch.tensor([256, 300, 100]), torch.tensor([256, 500, 400])
    assert crop_boxes(own, *sizes).tolist() == [[16, 16, 224, 224], [19, 119, 262, 262], [6, 156, 88, 88]]


@pytest.mark.parametrize(("start", "stop"), [(0, 64), (0, 1), (17, 40), (63, 64), (5, 5)])
def test_a_slice_is_what_the_whole_batch_has_there(start, stop):
    whole = draw(SPEC, 7, 123, 1, 64)
    part = draw(SPEC, 7, 123, 1, 64, start, stop)
    assert len(part) == stop - start
    assert same(part, whole[start:stop])
    assert same(part, draw(SPEC, 7, 123, 1, 1000, start, stop))


def test_a_slice_outside_the_batch_is_refused():
    with pytest.raises(ValueError, match="not within a batch of 8"):
        draw(SPEC, 0, 0, 0, 8, 4, 9)


def test_replay_and_keys():
    first = draw(SPEC, 7, 123, 1, 16)
    assert same(first, draw(SPEC, 7, 123, 1, 16))
    for key in [(8, 123, 1), (7, 124, 1), (7, 123, 0), (123, 7, 1), (-7, 123, 1)]:
        assert not (draw(SPEC, *key, 16).area == first.area).any()


def test_indexing():
    whole = draw(SPEC, 0, 0, 0, 8)
    assert same(whole[torch.tensor([2, 3])], whole[2:4])
    assert same(whole.to("cpu"), whole)
