"""Cascade R-CNN's heads against numbers worked out by hand."""

import math

import pytest
import torch
from torch import Tensor, nn

from momentum2._torchvision import torchvision
from momentum2.detection.cascade import STAGES, CascadeRoIHeads, ClassAgnosticPredictor, refine

SIZE = (100, 100)
TRUE_BOX = [20.0, 20.0, 60.0, 60.0]


def make_heads(classes: int = 2, sampled: int = 64) -> CascadeRoIHeads:
    """Heads on one level of 8 channels."""
    torch.manual_seed(0)
    detection = torchvision.models.detection
    pool = torchvision.ops.MultiScaleRoIAlign(["0"], 7, 2)
    mask_pool = torchvision.ops.MultiScaleRoIAlign(["0"], 14, 2)
    mask_rcnn = detection.roi_heads.RoIHeads(
        pool,
        detection.faster_rcnn.TwoMLPHead(8 * 49, 16),
        detection.faster_rcnn.FastRCNNPredictor(16, classes + 1),
        0.5,
        0.5,
        sampled,
        0.25,
        None,
        0.05,
        0.5,
        100,
        mask_roi_pool=mask_pool,
        mask_head=detection.mask_rcnn.MaskRCNNHeads(8, (8, 8, 8, 8), 1),
        mask_predictor=detection.mask_rcnn.MaskRCNNPredictor(8, 8, classes + 1),
    )
    return CascadeRoIHeads(mask_rcnn, 16, classes + 1)


def make_constant(heads: CascadeRoIHeads, deltas: list[list[float]], logits: list[list[float]]) -> None:
    """Every stage gives the same offsets and the same class scores, whatever it sees."""
    for stage, delta, logit in zip(heads.stages, deltas, logits, strict=True):
        for layer, bias in ((stage.box_predictor.bbox_pred, delta), (stage.box_predictor.cls_score, logit)):
            nn.init.zeros_(layer.weight)
            layer.bias.data = torch.tensor(bias, dtype=torch.float32)


def features() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"0": torch.randn(1, 8, 50, 50)}


def target() -> dict[str, Tensor]:
    mask = torch.zeros(1, *SIZE, dtype=torch.bool)
    mask[0, 20:60, 20:60] = True
    return {"boxes": torch.tensor([TRUE_BOX]), "labels": torch.tensor([2]), "masks": mask}


def test_each_stage_asks_for_more_overlap() -> None:
    # Boxes of the true width whose heights are a share of the true height: that share is the IoU.
    overlaps = [0.45, 0.55, 0.65, 0.75]
    proposals = torch.tensor([[20.0, 20.0, 60.0, 20 + 40 * share] for share in overlaps])
    expected = {0.5: [0, 2, 2, 2], 0.6: [0, 0, 2, 2], 0.7: [0, 0, 0, 2]}
    heads = make_heads()
    assert [stage.iou for stage in STAGES] == [0.5, 0.6, 0.7]
    for stage, settings in zip(heads.stages, STAGES, strict=True):
        _, labels = stage.assign_targets_to_proposals(
            [proposals], [torch.tensor([TRUE_BOX])], [torch.tensor([2])]
        )
        assert labels[0].tolist() == expected[settings.iou]


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_stage_decodes_offsets_at_its_own_scale(k: int) -> None:
    # A box of 40×20 at (30, 40): center (50, 50). The weights are (10, 10, 5, 5) × (k + 1).
    n = k + 1
    box = torch.tensor([[30.0, 40.0, 70.0, 60.0]])
    deltas = torch.tensor([[1.0, -2.0, 5 * n * math.log(0.5), 5 * n * math.log(2.0)]])
    (moved,) = refine(make_heads().stages[k], deltas, [box], [SIZE])
    x, y = 50 + 40 * 1 / (10 * n), 50 - 20 * 2 / (10 * n)
    assert moved[0].tolist() == pytest.approx([x - 10, y - 20, x + 10, y + 20], abs=1e-4)


def test_refined_boxes_stay_in_the_image_and_carry_no_gradient() -> None:
    deltas = torch.tensor([[0.0, 0.0, 5 * math.log(10.0), 0.0]], requires_grad=True)
    (moved,) = refine(make_heads().stages[0], deltas, [torch.tensor([[40.0, 10.0, 60.0, 30.0]])], [SIZE])
    assert moved.tolist() == [[0.0, 10.0, 100.0, 30.0]]
    assert not moved.requires_grad


def test_every_stage_samples_anew_from_refined_boxes_and_the_truth() -> None:
    heads = make_heads().train()
    # Stage 1 moves boxes right by 1/10 of their width, stage 2 down by 1/20 of their height.
    make_constant(heads, [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0]], [[0.0, 0, 0]] * 3)
    given: list[Tensor] = []
    taken: list[tuple[Tensor, Tensor]] = []
    for stage in heads.stages:
        real = stage.select_training_samples

        def record(proposals: list[Tensor], targets: list[dict[str, Tensor]], real=real):  # type: ignore[no-untyped-def]
            given.append(proposals[0])
            result = real(proposals, targets)
            taken.append((result[0][0], result[2][0]))
            return result

        stage.select_training_samples = record
    proposals = torch.tensor([[10.0, 20.0, 50.0, 60.0], [70.0, 70.0, 90.0, 90.0]])
    losses = heads(features(), [proposals], [SIZE], [target()])[1]
    assert all(bool(loss.isfinite()) for loss in losses.values())
    assert given[0].tolist() == proposals.tolist()
    # The true box was sampled too, but its refined copy is not among the proposals of the next stage.
    torch.testing.assert_close(given[1], torch.tensor([[14.0, 20.0, 54.0, 60.0], [72.0, 70.0, 92.0, 90.0]]))
    torch.testing.assert_close(given[2], torch.tensor([[14.0, 22.0, 54.0, 62.0], [72.0, 71.0, 92.0, 91.0]]))
    # IoU of the first box with the true one: 30·40/2000 = 0.6, 34·40/1840 = 0.74, 34·38/1908 = 0.68.
    first_label = [
        labels[(boxes == before[0]).all(1)].item()
        for (boxes, labels), before in zip(taken, given, strict=True)
    ]
    assert first_label == [2, 2, 0]
    for boxes, labels in taken:  # the true box itself is always there, and positive
        assert labels[(boxes == torch.tensor(TRUE_BOX)).all(1)].tolist() == [2]


def test_boxes_that_became_empty_are_dropped() -> None:
    heads = make_heads().train()
    # Ten widths to the right is out of the image: clipped, such a box has no area.
    make_constant(heads, [[100.0, 0, 0, 0], [0.0, 0, 0, 0], [0.0, 0, 0, 0]], [[0.0, 0, 0]] * 3)
    losses = heads(features(), [torch.tensor([[10.0, 20.0, 50.0, 60.0]])], [SIZE], [target()])[1]
    assert all(bool(loss.isfinite()) for loss in losses.values())


def test_detections_average_the_scores_and_chain_the_boxes() -> None:
    heads = make_heads().eval()
    probabilities = torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.4, 0.1], [0.2, 0.1, 0.7]])
    deltas = [[1.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 15 * math.log(0.5), 0]]
    make_constant(heads, deltas, probabilities.log().tolist())
    with torch.no_grad():
        (found,), losses = heads(features(), [torch.tensor([[10.0, 20.0, 50.0, 60.0]])], [SIZE])
    assert losses == {}
    # Right by 40/10, down by 2·40/20, then half as wide about the center (34, 44).
    box = [24.0, 24.0, 44.0, 64.0]
    # Class 1: (0.7 + 0.4 + 0.1)/3 = 0.4; class 2: (0.1 + 0.1 + 0.7)/3 = 0.3; one box for both.
    assert found["labels"].tolist() == [1, 2]
    assert found["scores"].tolist() == pytest.approx([0.4, 0.3], abs=1e-6)
    for row in found["boxes"].tolist():
        assert row == pytest.approx(box, abs=1e-4)
    assert found["masks"].shape == (2, 1, 28, 28)


def test_one_box_regression_serves_all_classes() -> None:
    predictor = ClassAgnosticPredictor(16, 5)
    scores, deltas = predictor(torch.randn(3, 16))
    assert scores.shape == (3, 5)
    assert predictor.bbox_pred.out_features == 4
    assert torch.equal(deltas.view(3, 5, 4), deltas[:, None, :4].expand(3, 5, 4))


def test_the_stages_share_the_gradient_of_the_features() -> None:
    heads = make_heads().train()
    maps = {"0": features()["0"].requires_grad_()}
    boxes = [torch.tensor([TRUE_BOX])]
    stage = heads.stages[0]
    scores, _ = heads._box_branch(stage, maps, boxes, [SIZE])
    (third,) = torch.autograd.grad(scores.sum(), maps["0"])
    pooled = stage.box_roi_pool(maps, boxes, [SIZE])
    plain, _ = stage.box_predictor(stage.box_head(pooled))
    (whole,) = torch.autograd.grad(plain.sum(), maps["0"])
    torch.testing.assert_close(scores, plain)
    torch.testing.assert_close(3 * third, whole)
    assert whole.abs().sum() > 0


def test_losses_train_every_part() -> None:
    heads = make_heads().train()
    proposals = torch.tensor([[18.0, 20.0, 60.0, 62.0], [70.0, 70.0, 90.0, 90.0], [25.0, 20.0, 60.0, 60.0]])
    losses = heads(features(), [proposals], [SIZE], [target()])[1]
    assert set(losses) == {"mask", *(f"{what}_{k}" for what in ("classifier", "box") for k in (1, 2, 3))}
    sum(losses.values(), torch.zeros(())).backward()
    without = [name for name, p in heads.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_an_image_without_objects() -> None:
    nothing = {
        "boxes": torch.zeros(0, 4),
        "labels": torch.zeros(0, dtype=torch.int64),
        "masks": torch.zeros(0, *SIZE, dtype=torch.bool),
    }
    losses = make_heads().train()(features(), [torch.tensor([[10.0, 20.0, 50.0, 60.0]])], [SIZE], [nothing])[
        1
    ]
    assert all(bool(loss.isfinite()) for loss in losses.values())
    assert losses["mask"] == 0
