"""The heads of the R-CNNs, with one stage and with three, against numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2.detection.presets import HeadConfig
from momentum2.detection.proposals import Proposals, sample
from momentum2.detection.rcnn import CASCADE, SINGLE, Heads, match
from momentum2.detection.targets import Target

SIZE = (100, 100)
TRUE_BOX = [20.0, 20.0, 60.0, 60.0]


def make_heads(
    stages: int = 3, classes: int = 2, masks: bool = True, channels: int = 8, width: int = 16
) -> Heads:
    """Heads on one level."""
    torch.manual_seed(0)
    config = HeadConfig(fpn_channels=channels, box_width=width, sampled=64)
    return Heads([2], classes, config, CASCADE if stages == 3 else SINGLE, masks)


def make_constant(heads: Heads, deltas: list[list[float]], logits: list[list[float]]) -> None:
    """Every stage gives the same offsets and the same class scores, whatever it sees."""
    for stage, delta, logit in zip(heads._stages(), deltas, logits, strict=True):
        for layer, bias in ((stage.bbox_pred, delta), (stage.cls_score, logit)):
            nn.init.zeros_(layer.weight)
            layer.bias.data = torch.tensor(bias, dtype=torch.float32)


def features() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"0": torch.randn(1, 8, 50, 50)}


def target() -> Target:
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, 20:60, 20:60] = True
    return {"boxes": torch.tensor([TRUE_BOX]), "labels": torch.tensor([1]), "masks": mask, "draw": 7}


def nothing() -> Target:
    empty = torch.zeros(0, *SIZE, dtype=torch.bool)
    return {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
        "masks": empty,
        "draw": 7,
    }


def losses_of(heads: Heads, proposals: Tensor, objects: Target) -> dict[str, Tensor]:
    losses: dict[str, Tensor] = heads.train()(features(), [proposals], [SIZE], [objects])[1]
    return losses


def test_each_stage_asks_for_more_overlap() -> None:
    # Boxes of the true width whose heights are a share of the true height: that share is the IoU.
    boxes = torch.tensor([[20.0, 20.0, 60.0, 20 + 40 * share] for share in (0.45, 0.55, 0.65, 0.75)])
    truth = torch.tensor([[80.0, 80.0, 90.0, 90.0], TRUE_BOX])
    found = {rule.iou: match(boxes, truth, rule.iou).tolist() for rule in CASCADE}
    assert found == {0.5: [-1, 1, 1, 1], 0.6: [-1, -1, 1, 1], 0.7: [-1, -1, -1, 1]}
    assert match(boxes, torch.zeros(0, 4), 0.5).tolist() == [-1] * 4


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_stage_decodes_offsets_at_its_own_scale(k: int) -> None:
    # A box of 40×20 at (30, 40): center (50, 50). The weights are (10, 10, 5, 5) × (k + 1).
    n = k + 1
    box = torch.tensor([[30.0, 40.0, 70.0, 60.0]])
    deltas = torch.tensor([[1.0, -2.0, 5 * n * math.log(0.5), 5 * n * math.log(2.0)]], requires_grad=True)
    moved = make_heads()._stages()[k].decode(deltas, box)
    x, y = 50 + 40 * 1 / (10 * n), 50 - 20 * 2 / (10 * n)
    assert moved[0, 0].tolist() == pytest.approx([x - 10, y - 20, x + 10, y + 20], abs=1e-4)
    assert not moved.requires_grad


def test_refined_boxes_stay_in_the_image() -> None:
    heads = make_heads()
    deltas = torch.tensor([[0.0, 0.0, 5 * math.log(10.0), 0.0]])
    (moved,) = heads._refine(heads._stages()[0], deltas, [torch.tensor([[40.0, 10.0, 60.0, 30.0]])], [SIZE])
    assert moved.tolist() == [[0.0, 10.0, 100.0, 30.0]]


def test_later_stages_label_the_same_boxes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = make_heads()
    # Stage 1 moves boxes right by 1/10 of their width, stage 2 down by 1/20 of their height.
    make_constant(heads, [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0]], [[0.0, 0, 0]] * 3)
    seen: list[tuple[Tensor, Tensor]] = []
    real = heads._labels
    pooled: list[Tensor] = []
    monkeypatch.setattr(
        heads, "_labels", lambda objects, targets: (seen.append(objects[0]), real(objects, targets))[1]
    )
    pool = heads.box_pool.forward
    monkeypatch.setattr(
        heads.box_pool, "forward", lambda maps, boxes: (pooled.append(boxes[0]), pool(maps, boxes))[1]
    )
    proposals = torch.tensor([[10.0, 20.0, 50.0, 60.0], [70.0, 70.0, 90.0, 90.0]])
    losses_of(heads, proposals, target())
    order = [[b.tolist() for b in pooled[0]].index(box) for box in (*proposals.tolist(), TRUE_BOX)]
    expected = (
        [[10.0, 20, 50, 60], [70, 70, 90, 90], TRUE_BOX],
        [[14.0, 20, 54, 60], [72, 70, 92, 90], [24, 20, 64, 60]],
        [[14.0, 22, 54, 62], [72, 71, 92, 91], [24, 22, 64, 62]],
    )
    for boxes, known in zip(pooled, expected, strict=True):
        torch.testing.assert_close(boxes[order], torch.tensor(known))
    # IoU of the first with the truth: 30·40/2000 = 0.6, 34·40/1840 = 0.74, 34·38/1908 = 0.68; of the true box's
    # copies 36·40/1760 = 0.82 and 36·38/1832 = 0.75.
    labels = [objects[order].tolist() for objects in seen[:3]]
    assert labels == [[0, -1, 0], [0, -1, 0], [-1, -1, 0]]


def test_boxes_that_became_empty_are_dropped_in_training() -> None:
    heads = make_heads()
    # Ten widths to the right is out of the image: clipped, such a box has no area.
    make_constant(heads, [[100.0, 0, 0, 0], [0.0, 0, 0, 0], [0.0, 0, 0, 0]], [[0.0, 0, 0]] * 3)
    losses = losses_of(heads, torch.tensor([[10.0, 20.0, 50.0, 60.0]]), target())
    assert all(bool(loss.isfinite()) for loss in losses.values())
    assert losses["loss_classifier_2"] == 0


def test_losses_worked_out_by_hand() -> None:
    heads = make_heads(stages=1)
    # One offset per class; that of class 1 is off by (1, 2, 3, 4) for the true box itself.
    make_constant(heads, [[9.0, 9, 9, 9, 1, 2, 3, 4]], [[0.0, math.log(2.0), 0.0]])
    with torch.no_grad():
        losses = losses_of(heads, torch.tensor([[70.0, 70.0, 90.0, 90.0]]), target())
    # Two boxes: the true one, class 1 with probability 1/2, and background with 1/4.
    assert float(losses["loss_classifier"]) == pytest.approx((math.log(2) + math.log(4)) / 2, abs=1e-6)
    assert float(losses["loss_box_reg"]) == pytest.approx(10 / 2, abs=1e-5)  # L1, over all sampled boxes
    # Logits of the mask branch are almost 0 at the start: every bin costs log 2.
    assert float(losses["loss_mask"]) == pytest.approx(math.log(2), abs=1e-2)


def test_detections_average_the_scores_and_chain_the_boxes() -> None:
    heads = make_heads().eval()
    probabilities = torch.tensor([[0.7, 0.1, 0.2], [0.4, 0.1, 0.5], [0.1, 0.7, 0.2]])
    deltas = [[1.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 15 * math.log(0.5), 0]]
    make_constant(heads, deltas, probabilities.log().tolist())
    with torch.no_grad():
        (found,), losses = heads(features(), [torch.tensor([[10.0, 20.0, 50.0, 60.0]])], [SIZE])
    assert losses == {}
    # Right by 40/10, down by 2·40/20, then half as wide about the center (34, 44).
    # Class 0: (0.7 + 0.4 + 0.1)/3 = 0.4; class 1: (0.1 + 0.1 + 0.7)/3 = 0.3; one box for both.
    assert found["labels"].tolist() == [0, 1]
    assert found["scores"].tolist() == pytest.approx([0.4, 0.3], abs=1e-6)
    for row in found["boxes"].tolist():
        assert row == pytest.approx([24.0, 24.0, 44.0, 64.0], abs=1e-4)
    assert found["masks"].shape == (2, 28, 28)


def test_one_stage_has_a_box_for_each_class() -> None:
    heads = make_heads(stages=1, masks=False).eval()
    make_constant(heads, [[1.0, 0, 0, 0, 0, 1.0, 0, 0]], [[2.0, 1.0, 0.0]])
    with torch.no_grad():
        (found,), _ = heads(features(), [torch.tensor([[10.0, 20.0, 50.0, 60.0]])], [SIZE])
    assert found["labels"].tolist() == [0, 1]
    torch.testing.assert_close(
        found["boxes"], torch.tensor([[14.0, 20.0, 54.0, 60.0], [10.0, 24.0, 50.0, 64.0]])
    )
    assert found["scores"].tolist() == pytest.approx(torch.tensor([2.0, 1.0, 0.0]).softmax(0)[:2].tolist())
    assert "masks" not in found


def test_boxes_of_a_class_that_overlap_are_one_and_empty_ones_none() -> None:
    heads = make_heads(stages=1, masks=False).eval()
    make_constant(heads, [[0.0] * 8], [[2.0, -9.0, 0.0]])
    boxes = torch.tensor([[10.0, 20.0, 50.0, 60.0], [11.0, 20.0, 51.0, 60.0], [5.0, 5.0, 5.0, 9.0]])
    with torch.no_grad():
        (found,), _ = heads(features(), [boxes], [SIZE])
    assert found["boxes"].tolist() == [[10.0, 20.0, 50.0, 60.0]]


def test_the_stages_share_the_gradient_of_the_features() -> None:
    heads = make_heads().train()
    level = features()["0"].requires_grad_()
    boxes = [torch.tensor([TRUE_BOX])]
    stage = heads._stages()[0]
    scores, _ = heads._branch(stage, [level], boxes)
    (third,) = torch.autograd.grad(scores.sum(), level)
    plain, _ = stage(heads.box_pool([level], boxes))
    (whole,) = torch.autograd.grad(plain.sum(), level)
    torch.testing.assert_close(scores, plain)
    torch.testing.assert_close(3 * third, whole)
    assert whole.abs().sum() > 0


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("masks", [False, True])
def test_losses_train_every_part(stages: int, masks: bool) -> None:
    heads = make_heads(stages, masks=masks)
    proposals = torch.tensor([[18.0, 20.0, 60.0, 62.0], [70.0, 70.0, 90.0, 90.0], [25.0, 20.0, 60.0, 60.0]])
    losses = losses_of(heads, proposals, target())
    names = [""] if stages == 1 else ["_1", "_2", "_3"]
    expected = {f"loss_{what}{k}" for what in ("classifier", "box_reg") for k in names}
    assert set(losses) == (expected | {"loss_mask"} if masks else expected)
    sum(losses.values(), torch.zeros(())).backward()
    without = [name for name, p in heads.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("stages", [1, 3])
def test_an_image_without_objects(stages: int) -> None:
    heads = make_heads(stages)
    losses = losses_of(heads, torch.tensor([[10.0, 20.0, 50.0, 60.0]]), nothing())
    assert all(bool(loss.isfinite()) for loss in losses.values())
    assert losses["loss_mask"] == 0
    losses = losses_of(heads, torch.zeros(0, 4), nothing())  # nor any proposal
    assert not torch.stack(list(losses.values())).any()


def test_weights_begin_as_in_detectron2() -> None:
    heads = make_heads(stages=1, classes=20, channels=64, width=256)
    (stage,) = heads._stages()
    stds = {
        "fc6": (64 * 49) ** -0.5,
        "fc7": 256**-0.5,
        "cls_score": 0.01,
        "bbox_pred": 0.001,
    }
    for name, std in stds.items():
        layer = stage.get_submodule(name)
        assert float(layer.weight.detach().std()) == pytest.approx(std, rel=0.1), name  # type: ignore[union-attr,operator,arg-type]
    convolutions = [m for m in heads.mask_branch.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(convolutions) == 6
    for layer in convolutions[:4]:
        assert float(layer.weight.detach().std()) == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1)
    assert float(convolutions[-1].weight.detach().std()) == pytest.approx(0.001, rel=0.2)
    biases = [p for name, p in heads.named_parameters() if name.endswith("bias")]
    assert len(biases) == 10
    assert not any(bias.any() for bias in biases)


def test_samples_have_their_shares_and_depend_on_the_draw_alone() -> None:
    labels = torch.tensor([1.0] * 10 + [0.0] * 50 + [-1.0] * 40)
    first = sample(labels, 16, 0.25, 3, "boxes")
    assert sorted(labels[first].tolist(), reverse=True) == [1.0] * 4 + [0.0] * 12
    torch.manual_seed(9)
    assert torch.equal(first, sample(labels, 16, 0.25, 3, "boxes"))
    for draw, what in ((4, "boxes"), (3, "anchors")):
        assert not torch.equal(first, sample(labels, 16, 0.25, draw, what))
    few = sample(torch.tensor([0.0, 1.0, 0.0]), 16, 0.25, 0, "boxes")
    assert sorted(few.tolist()) == [0, 1, 2]


def test_proposals_learn_by_l1_from_a_sample_of_their_own() -> None:
    class Anchors(nn.Module):
        def num_anchors_per_location(self) -> list[int]:
            return [3]

    proposals = Proposals(Anchors(), 8, train=10, test=5)
    anchors = [torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40], [60, 60, 70, 70], [20, 20, 40, 45]])]
    one: Target = {"boxes": torch.tensor([[20.0, 20, 40, 40]]), "labels": torch.tensor([0]), "draw": 1}
    labels, truth = proposals.assign_targets_to_anchors(anchors, [one])
    assert labels[0].tolist() == [0, 1, 0, 1]
    assert truth[0][1].tolist() == [20, 20, 40, 40]
    logits, deltas = (
        torch.tensor([[0.3], [0.2], [-0.4], [-2.0]]),
        torch.tensor([[1.0, -2, 0, 5]]).repeat(4, 1),
    )
    offsets = [torch.zeros(4, 4)]
    objectness, boxes = proposals.compute_loss(logits, deltas, labels, offsets)
    every = F.binary_cross_entropy_with_logits(logits[:, 0], labels[0], reduction="sum")
    assert float(objectness) == pytest.approx(float(every) / 256, rel=1e-6)
    assert float(boxes) == pytest.approx(2 * 8 / 256)
