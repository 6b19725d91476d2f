"""RetinaNet's and FCOS's losses, and the moving average that divides them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from momentum2.detection.dense import FCOSTowers, Positives, RetinaNetTowers
from momentum2.detection.targets import Target


def test_the_average_after_three_steps() -> None:
    positives = Positives(50.0).train()
    steps = [[(10, 2), (30, 2)], [(0, 2), (0, 2)], [(100, 4)]]  # (positives, images) of each micro-batch
    expected = 50.0
    for step in steps:
        for count, images in step:
            assert float(positives(count, images)) == pytest.approx(expected * images)  # of the steps before
        positives.commit()
        total, images = (sum(values) for values in zip(*step, strict=True))
        expected = 0.9 * expected + 0.1 * max(total, 1) / images
        assert float(positives.mean) == pytest.approx(expected, rel=1e-6)
    assert set(positives.state_dict()) == {"mean"}


def test_evaluation_does_not_count() -> None:
    positives = Positives(50.0).eval()
    positives(1000, 1)
    assert positives.seen.tolist() == [0, 0]


def by_hand(logits: Tensor, truth: Tensor) -> Tensor:
    """Focal loss, α = 0.25, γ = 2, by its formula."""
    p = logits.sigmoid()
    at = torch.where(truth > 0, p, 1 - p)
    return -(torch.where(truth > 0, 0.25, 0.75) * (1 - at) ** 2 * at.log()).sum()


def test_retinanet_sums_before_it_divides() -> None:
    torch.manual_seed(0)
    head = RetinaNetTowers(32, 1, 3, None).train()
    anchors = [torch.tensor([[0.0, 0, 10, 10], [10, 0, 20, 10], [0, 10, 10, 20], [10, 10, 20, 20]])] * 2
    targets: list[Target] = [
        {"boxes": torch.tensor([[1.0, 0, 11, 10]]), "labels": torch.tensor([2])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    matched = [torch.tensor([0, -1, -2, 0]), torch.tensor([-1, -1, -1, -1])]
    outputs = {"cls_logits": torch.randn(2, 4, 3), "bbox_regression": torch.randn(2, 4, 4)}
    losses = head.compute_loss(targets, outputs, anchors, matched)
    truth = torch.zeros(2, 4, 3)
    truth[0, 0, 2] = truth[0, 3, 2] = 1
    keep = torch.ones(2, 4, dtype=torch.bool)
    keep[0, 2] = False  # between the thresholds
    divisor = 50.0 * 2
    torch.testing.assert_close(
        losses["classification"], by_hand(outputs["cls_logits"][keep], truth[keep]) / divisor
    )
    # The box is one pixel to the right of the first anchor, and (-9, -10) from the last.
    offsets = torch.tensor([[0.1, 0, 0, 0], [-0.9, -1.0, 0, 0]])
    found = F.l1_loss(outputs["bbox_regression"][0, [0, 3]], offsets, reduction="sum") / divisor
    torch.testing.assert_close(losses["bbox_regression"], found)
    assert head.positives.seen.tolist() == [2, 2]


def test_fcos_has_the_same_divisor() -> None:
    torch.manual_seed(0)
    head = FCOSTowers(32, 3, None).train()
    anchors = [torch.tensor([[0.0, 0, 8, 8], [8, 0, 16, 8], [0, 8, 8, 16], [8, 8, 16, 16]])]
    targets: list[Target] = [{"boxes": torch.tensor([[0.0, 0, 16, 16]]), "labels": torch.tensor([1])}]
    matched = [torch.tensor([0, 0, 0, -1])]
    outputs = {
        "cls_logits": torch.randn(1, 4, 3),
        "bbox_regression": torch.rand(1, 4, 4),
        "bbox_ctrness": torch.randn(1, 4, 1),
    }
    losses = head.compute_loss(targets, outputs, anchors, matched)
    truth = torch.zeros(1, 4, 3)
    truth[0, :3, 1] = 1
    torch.testing.assert_close(losses["classification"], by_hand(outputs["cls_logits"], truth) / 150)
    # Each point lies 4 and 12 pixels from the sides: centerness √(1/3 · 1/3).
    center = F.binary_cross_entropy_with_logits(
        outputs["bbox_ctrness"][0, :3, 0], torch.full((3,), 1 / 3), reduction="sum"
    )
    torch.testing.assert_close(losses["bbox_ctrness"], center / 150)
    assert head.positives.seen.tolist() == [3, 1]
