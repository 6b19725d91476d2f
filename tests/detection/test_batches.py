"""Scales, flips, sampling and batches: pure functions of (seed, step)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from momentum2.detection.batches import Batches
from momentum2.detection.data import open_data
from momentum2.detection.presets import DetectConfig, DetectionDataConfig, preset
from momentum2.detection.sampling import Sampler, repeat_factors
from momentum2.detection.schedule import resolve
from momentum2.detection.targets import Target
from momentum2.detection.transforms import Draw, draw, flip, resize, resize_boxes, scaled_size, training_view
from momentum2.errors import UserError
from momentum2.schedules import warmup_step_decay

CONFIG = DetectionDataConfig(
    short_edges=[32, 40, 48], test_short_edge=40, max_long_edge=64, train_size=20, workers=1
)


def scene() -> tuple[torch.Tensor, Target]:
    masks = torch.zeros(1, 4, 6, dtype=torch.bool)
    masks[0, 1:3, 0:2] = True
    return torch.rand(3, 4, 6), Target(
        boxes=torch.tensor([[0.0, 1, 2, 3]]), labels=torch.tensor([5]), masks=masks
    )


def test_a_flip_mirrors_pixels_boxes_and_masks() -> None:
    image, target = scene()
    mirrored, flipped = flip(image, target)
    assert torch.equal(mirrored[:, :, 0], image[:, :, 5])
    assert flipped["boxes"].tolist() == [[4, 1, 6, 3]]
    assert flipped["masks"][0].nonzero().tolist() == [[1, 4], [1, 5], [2, 4], [2, 5]]
    again, back = flip(mirrored, flipped)
    assert torch.equal(again, image)
    assert torch.equal(back["boxes"], target["boxes"])
    assert target["boxes"].tolist() == [[0, 1, 2, 3]], "the argument was changed"


def test_resizing_keeps_boxes_on_their_objects() -> None:
    image, target = scene()
    assert resize(image, (8, 18)).shape == (3, 8, 18)
    assert resize_boxes(target["boxes"], (4, 6), (8, 18)).tolist() == [[0, 2, 6, 6]]
    view, scaled = training_view(torch.zeros(3, 4, 6, dtype=torch.uint8), target, Draw(8, True), 100)
    assert view.shape == (3, 8, 12)
    assert scaled["boxes"].tolist() == [[8, 2, 12, 6]]
    assert torch.equal(scaled["masks"], target["masks"].flip(2))  # at the size that it was annotated


@pytest.mark.parametrize(
    ("size", "scaled"),
    [((480, 640), (800, 1067)), ((640, 480), (1067, 800)), ((300, 900), (444, 1333))],
)
def test_the_short_edge_is_as_asked_unless_the_other_grows_too_long(
    size: tuple[int, int], scaled: tuple[int, int]
) -> None:
    assert scaled_size(*size, 800, 1333) == scaled
    assert scaled_size(5, 9, 10, 13) == (7, 13)  # 5 · 13/9 = 7.2
    assert scaled_size(5, 2, 1, 100) == (3, 1)  # 2.5 is rounded up


def test_draws_depend_on_seed_step_and_place_alone() -> None:
    draws = [draw(CONFIG, 0, step, place) for step in range(40) for place in range(8)]
    assert draws == [draw(CONFIG, 0, step, place) for step in range(40) for place in range(8)]
    assert draws != [draw(CONFIG, 1, step, place) for step in range(40) for place in range(8)]
    share = {edge: sum(d.short_edge == edge for d in draws) / len(draws) for edge in CONFIG.short_edges}
    assert share == pytest.approx(dict.fromkeys(CONFIG.short_edges, 1 / 3), abs=0.1)
    assert sum(d.flip for d in draws) / len(draws) == pytest.approx(0.5, abs=0.1)


def test_a_view_is_scaled_to_the_unit_interval() -> None:
    target = scene()[1]
    image, _ = training_view(torch.full((3, 4, 6), 255, dtype=torch.uint8), target, Draw(8, True), 100)
    assert image.shape == (3, 8, 12)
    assert torch.equal(image, torch.ones(3, 8, 12))


def test_repeat_factors_are_those_of_lvis() -> None:
    # Class 0 is in all four images, class 1 in one of four: √(0.5 / 0.25) = √2.
    factors = repeat_factors([frozenset({0}), frozenset({0}), frozenset({0, 1}), frozenset({0})], 0.5)
    assert factors.tolist() == pytest.approx([1, 1, 2**0.5, 1])
    assert repeat_factors([frozenset(), frozenset({3})], 0.001).tolist() == [1, 1]


def test_an_epoch_shows_every_image_once_without_factors() -> None:
    sampler = Sampler(np.ones(30), seed=0, batch_size=10)
    for epoch in range(3):
        seen = np.concatenate([sampler.batch(step) for step in range(3 * epoch, 3 * epoch + 3)])
        assert sorted(seen.tolist()) == list(range(30))
    assert sampler.batch(0).tolist() != sampler.batch(3).tolist()


def test_images_are_repeated_as_often_as_their_factors_say() -> None:
    factors = np.array([1.0, 2.5, 1.25, 3.0, 1.25])  # 9 draws
    sampler = Sampler(factors, seed=3, batch_size=3)
    assert sampler.steps_per_epoch == 3
    epochs = 400
    counts = np.zeros(5)
    for epoch in range(epochs):
        seen = np.bincount(np.concatenate([sampler.batch(3 * epoch + i) for i in range(3)]), minlength=5)
        assert ((seen >= np.floor(factors)) & (seen <= np.ceil(factors))).all()
        counts += seen
    assert (counts / epochs).tolist() == pytest.approx(factors.tolist(), abs=0.08)


def batches(workers: int, masks: bool = True) -> Batches:
    config = DetectionDataConfig(**{**vars(CONFIG), "workers": workers})
    data = open_data(config, training=True, seed=0)
    return Batches(data, config, Sampler(np.ones(20), 0, 4), masks, 7, torch.device("cpu"))


def test_batches_are_the_same_from_any_start_and_with_any_number_of_threads() -> None:
    with batches(0)(0) as direct, batches(3)(2) as ahead:
        expected = list(direct)
        found = list(ahead)
    assert [b.step for b in expected] == list(range(7))
    assert [b.step for b in found] == list(range(2, 7))
    for one, other in zip(expected[2:], found, strict=True):
        for (image, target), (image_2, target_2) in zip(one.views, other.views, strict=True):
            assert torch.equal(image, image_2)
            assert all(torch.equal(target[k], target_2[k]) for k in ("boxes", "labels", "masks"))


def test_a_batch_is_sorted_by_shape_before_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image once, with the draws of its own place, and each process has images of similar shapes."""
    made = batches(0, masks=False)
    shapes = [0.5, 2.0, 1.0, 0.6, 1.9, 1.1, 0.7, 1.8, 1.2, 0.8] * 2
    object.__setattr__(made.data, "aspect", lambda i: shapes[i])
    alone = [made._share(step) for step in range(5)]
    for step, share in enumerate(alone):
        batch = made.sampler.batch(step).tolist()
        assert sorted(share) == sorted(enumerate(batch))
        assert [shapes[i] for _, i in share] == sorted(shapes[i] for i in batch)
    monkeypatch.setattr("momentum2.distributed.world_size", lambda: 2)
    parts = []
    for rank in range(2):
        monkeypatch.setattr("momentum2.distributed.rank", lambda rank=rank: rank)
        parts.append([made._share(step) for step in range(5)])
    assert [one + other for one, other in zip(*parts, strict=True)] == alone


def test_draws_of_samples_belong_to_a_place() -> None:
    with batches(0, masks=False)(0) as made:
        draws = [[target["draw"] for _, target in batch.views] for batch in made]
    assert len({draw for step in draws for draw in step}) == 7 * 4
    with batches(2, masks=False)(3) as made:
        assert [target["draw"] for _, target in next(iter(made)).views] == draws[3]


def test_micro_batches_make_up_the_batch() -> None:
    with batches(0, masks=False)(0) as made:
        batch = next(iter(made))
    images, targets = batch.inputs(0, 1)
    halves = [batch.inputs(i, 2) for i in range(2)]
    assert [id(image) for half, _ in halves for image in half] == [id(image) for image in images]
    assert len(targets) == 4
    assert all("masks" not in target for target in targets)


def test_an_error_in_a_thread_reaches_the_loop() -> None:
    made = batches(2)
    object.__setattr__(made.data, "image", lambda i: (_ for _ in ()).throw(UserError("bad image")))
    with pytest.raises(UserError, match="bad image"), made(0) as stream:
        list(stream)


def test_the_learning_rate_falls_to_a_tenth_at_two_thirds_and_eight_ninths() -> None:
    lr = [
        warmup_step_decay(0.02, k, 90_000, (2 / 3, 8 / 9), 1000)
        for k in (0, 500, 1000, 59_999, 60_000, 79_999, 80_000, 89_999)
    ]
    assert lr == pytest.approx([2e-5, 0.02 * 0.5005, 0.02, 0.02, 2e-3, 2e-3, 2e-4, 2e-4])


def test_milestones_may_be_others() -> None:
    config = preset("mask_rcnn", "coco")
    assert resolve(config, 7329, 1).milestones == (2 / 3, 8 / 9)
    changed = resolve(replace(config, optim=replace(config.optim, milestones=[0.5])), 7329, 1)
    assert [changed.lr(k) for k in (44_999, 45_000, 89_999)] == pytest.approx([0.02, 2e-3, 2e-3])


def test_schedules_count_images() -> None:
    coco = preset("mask_rcnn", "coco")
    plan = resolve(coco, steps_per_epoch=7329, world=8)
    assert plan.steps == 90_000
    assert plan.lr_base == pytest.approx(0.02)
    assert plan.warmup == 1000
    assert resolve(preset("retinanet", "coco"), 7329, 1).lr_base == pytest.approx(0.01)
    lvis = resolve(preset("mask_rcnn", "lvis"), 56_740 // 16, 1)
    assert (lvis.steps, lvis.warmup) == (90_000, 1000)
    own = resolve(replace(coco, schedule="epochs", train=replace(coco.train, epochs=12)), 62, 1)
    assert (own.steps, own.warmup) == (744, 74)  # of a thousand images: a tenth of the run, not 8 steps
    in_epochs = replace(coco, optim=replace(coco.optim, warmup_epochs=0.5))
    assert resolve(in_epochs, 100, 1).warmup == 50
    shapes = preset("fcos", "shapes")
    assert resolve(shapes, 100, 1).steps == 100 * shapes.train.epochs


def test_presets_are_the_papers() -> None:
    edges = list(range(640, 801, 32))
    assert preset("retinanet", "coco").data.short_edges == edges
    assert preset("fcos", "coco").data.short_edges == [800]
    lvis = preset("mask_rcnn", "lvis")
    assert (lvis.schedule, lvis.data.split, lvis.data.repeat_threshold) == ("1x", "v0.5_train", 0.001)


def test_a_batch_that_cannot_be_divided() -> None:
    config: DetectConfig = preset("mask_rcnn", "coco")
    with pytest.raises(UserError, match="cannot be divided among 3 process"):
        resolve(config, 10, world=3)
