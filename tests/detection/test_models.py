"""The detectors: every part is trained, nothing is left to guesses from the first batch."""

from dataclasses import replace
from typing import cast, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2 import backbones
from momentum2.detection.detector import Detector
from momentum2.detection.maps import Maps, maps_of
from momentum2.detection.models import Anchors, Pyramid, build_detector
from momentum2.detection.presets import (
    WITH_MASKS,
    DetectionDataName,
    DetectorName,
    HeadConfig,
    preset,
)
from momentum2.detection.targets import Target
from momentum2.detection.transforms import Draw, training_view
from momentum2.errors import UserError
from momentum2.norms import SyncedBatchNorm
from momentum2.weights import Architecture

MODELS: tuple[DetectorName, ...] = get_args(DetectorName)
HEAD = HeadConfig(32, "group", box_width=16, proposals=20, sampled=16, score_threshold=0.0, detections=5)


def make(name: DetectorName, short_edge: int = 64) -> Detector:
    torch.manual_seed(0)
    encoder = backbones.build("resnet18", "small", 0.125)
    return Detector(build_detector(name, encoder, 3, HEAD), short_edge, 128)


def targets(height: int = 64, width: int = 64) -> list[Target]:
    """Image 0 has two objects, image 1 none."""
    masks = torch.zeros(2, height, width, dtype=torch.bool)
    masks[0, 8:30, 10:34] = True
    masks[1, 30:60, 20:56] = True
    full = {
        "boxes": torch.tensor([[10.0, 8.0, 34.0, 30.0], [20.0, 30.0, 56.0, 60.0]]),
        "labels": torch.tensor([0, 2]),
        "masks": masks,
    }
    nothing = {name: value[:0] for name, value in full.items()}
    return [cast(Target, {**objects, "draw": draw}) for draw, objects in enumerate((full, nothing))]


@pytest.mark.parametrize("name", MODELS)
def test_losses_train_every_parameter(name: DetectorName) -> None:
    detector = make(name).train()
    torch.manual_seed(1)
    output = detector([torch.rand(3, 64, 64), torch.rand(3, 60, 50)], targets())
    assert output.loss.isfinite()
    assert output.z is None
    torch.testing.assert_close(output.loss.detach(), torch.stack(list(output.metrics.values())).sum())
    output.loss.backward()
    assert [n for n, p in detector.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", ["mask_rcnn", "fcos"])
def test_boxes_keep_their_precision_under_autocast(name: DetectorName) -> None:
    """A box at 1000 pixels would be rounded to a multiple of 4 in bf16; only the backbone computes in it."""
    detector = make(name).eval()
    image = torch.rand(3, 64, 64)
    plain = detector.detect(image)
    seen = []
    pyramid = detector.model.get_submodule("backbone")
    hook = pyramid.get_submodule("body").register_forward_hook(lambda *a: seen.append(a[2][0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = detector.detect(image)
    hook.remove()
    assert seen == [torch.bfloat16]
    assert found["boxes"].dtype == found["scores"].dtype == torch.float32
    assert not torch.equal(found["boxes"], found["boxes"].bfloat16().float())
    assert found["scores"].tolist() == pytest.approx(plain["scores"].tolist(), rel=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_without_any_object(name: DetectorName) -> None:
    detector = make(name).train()
    output = detector([torch.rand(3, 64, 64)], targets()[1:])
    assert output.loss.isfinite()
    output.loss.backward()
    assert [n for n, p in detector.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", MODELS)
def test_detections_are_in_the_pixels_of_the_image(name: DetectorName) -> None:
    found = make(name).eval().detect(torch.rand(3, 90, 150))
    n = len(found["scores"])
    assert 0 < n <= HEAD.detections
    assert found["boxes"].shape == (n, 4)
    assert 0 <= int(found["labels"].min()) <= int(found["labels"].max()) < 3
    assert found["boxes"].min() >= 0
    assert found["boxes"][:, 2].max() <= 150
    assert found["boxes"][:, 3].max() <= 90
    assert found["scores"].tolist() == sorted(found["scores"].tolist(), reverse=True)
    if name in WITH_MASKS:
        assert found["masks"].shape == (n, 90, 150)
        assert found["masks"].dtype == torch.bool
    else:
        assert "masks" not in found


@pytest.mark.parametrize("name", MODELS)
def test_all_batch_norms_are_synced_and_learn(name: DetectorName) -> None:
    detector = make(name)
    norms = [m for m in detector.modules() if isinstance(m, _BatchNorm)]
    assert norms
    assert {type(m) for m in norms} == {SyncedBatchNorm}
    assert all(p.requires_grad for p in detector.parameters())


@pytest.mark.parametrize(
    ("name", "data", "norms"),
    [("fcos", "coco", 8), ("retinanet", "coco", 0), ("fcos", "shapes", 8), ("retinanet", "shapes", 8)],
)
def test_which_heads_have_group_norm(name: DetectorName, data: DetectionDataName, norms: int) -> None:
    head = preset(name, data).head
    model = build_detector(name, backbones.build("resnet18", "small", 0.125), 3, head)
    assert sum(isinstance(m, nn.GroupNorm) for m in model.modules()) == norms


@pytest.mark.parametrize("name", ["fcos", "retinanet"])
def test_a_head_without_norms_has_none_and_any_width(name: DetectorName) -> None:
    head = replace(HEAD, tower_norm="none", fpn_channels=48)
    model = build_detector(name, backbones.build("resnet18", "small", 0.125), 3, head)
    assert not any(isinstance(m, nn.GroupNorm) for m in model.modules())
    losses = model.train()([torch.rand(3, 64, 64)], targets()[:1])
    assert torch.stack(list(losses.values())).isfinite().all()


@pytest.mark.parametrize("width", [0.5, 1.0])  # the last map has 256 channels, as many as a level, or 512
@pytest.mark.parametrize(("name", "from_level"), [("fcos", True), ("retinanet", False)])
def test_p6_comes_from_the_level_in_fcos_and_from_the_map_in_retinanet(
    name: DetectorName, from_level: bool, width: float
) -> None:
    encoder = backbones.build("resnet18", "small", width)
    model = build_detector(name, encoder, 3, replace(HEAD, fpn_channels=256))
    top = model.get_submodule("backbone.fpn.extra_blocks")
    seen = []
    top.get_submodule("p6").register_forward_pre_hook(lambda module, x: seen.append(x[0]))
    pyramid = model.get_submodule("backbone").eval()
    with torch.no_grad():
        image = torch.rand(1, 3, 32, 32)
        levels, maps = pyramid(image), pyramid.get_submodule("body")(image)
    assert torch.equal(seen[0], levels["2"] if from_level else maps[-1])


def test_the_branches_are_the_papers() -> None:
    heads = make("mask_rcnn").model.get_submodule("roi_heads")
    assert sum(isinstance(m, nn.Conv2d) for m in heads.get_submodule("mask_branch.0").modules()) == 4
    assert [n for n in dict(heads.get_submodule("stages.0").named_children()) if n.startswith("fc")] == [
        "fc6",
        "fc7",
    ]
    assert "mask_branch.0.0.0.weight" not in make("faster_rcnn").model.get_submodule("roi_heads").state_dict()


def test_a_cascade_trains_on_twice_the_proposals() -> None:
    for name, count in (("mask_rcnn", 20), ("cascade_rcnn", 40)):
        rpn = make(name).model.get_submodule("rpn")  # type: ignore[arg-type]
        assert rpn.train().post_nms_top_n() == count  # type: ignore[operator]
        assert rpn.eval().post_nms_top_n() == 20  # type: ignore[operator]


def test_training_and_evaluation_show_the_same_pixels() -> None:
    detector = make("retinanet", short_edge=48).eval()
    image = torch.randint(0, 256, (3, 93, 131), dtype=torch.uint8)
    view, _ = training_view(image, targets()[1], Draw(48, False), 128)
    seen = []
    detector.model.register_forward_pre_hook(lambda module, x: seen.append(x[0][0]))
    detector.detect(image.float() / 255)
    assert torch.equal(seen[0], view)
    assert view.shape == (3, 48, 68)  # 131 · 48 / 93 = 67.6


@pytest.mark.parametrize(
    ("stem", "strides"), [("imagenet", [4, 8, 16, 32, 64]), ("small", [2, 4, 8, 16, 32])]
)
def test_the_pyramid_knows_its_strides(stem: str, strides: list[int]) -> None:
    encoder = backbones.build("resnet18", stem, 0.125)  # type: ignore[arg-type]
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    pyramid = Pyramid(maps_of(encoder), 4, 32, "subsampled").eval()
    assert pyramid.strides == strides
    levels = list(pyramid(torch.zeros(1, 3, 128, 128)).values())
    assert [128 // level.shape[2] for level in levels] == strides
    assert all(torch.equal(value, before[name]) for name, value in pyramid.body.state_dict().items())


class Pooled(Maps):
    """An encoder of another family: a convolution after each of five poolings."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3 if i == 0 else 4 + i, 5 + i, 3, padding=1), nn.BatchNorm2d(5 + i))
            for i in range(5)
        )
        self.measure()

    def forward(self, images: Tensor) -> list[Tensor]:
        maps, x = [], images
        for part in self.parts:
            x = part(nn.functional.max_pool2d(x, 2, ceil_mode=True))
            maps.append(x)
        return maps


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_needs_no_more_than_maps(name: DetectorName) -> None:
    assert Pooled().channels == (5, 6, 7, 8, 9)
    assert Pooled().strides == (2, 4, 8, 16, 32)
    torch.manual_seed(0)
    detector = Detector(build_detector(name, Pooled(), 3, HEAD), 64, 128).train()
    detector([torch.rand(3, 64, 64)], targets()[:1]).loss.backward()
    assert [n for n, p in detector.named_parameters() if p.grad is None] == []


def test_anchors_lie_at_true_strides() -> None:
    class Images:
        image_sizes = ((40, 40), (40, 40))

    anchors = Anchors([8, 16], [2, 4], (1.0,))
    # 40 pixels: five cells of 8, and three of 16 (the last half outside).
    first, second = anchors(Images(), [torch.zeros(2, 1, 5, 5), torch.zeros(2, 1, 3, 3)])
    assert torch.equal(first, second)
    assert first.shape == ((25 + 9) * 2, 4)
    assert first[0].tolist() == [-8, -8, 8, 8]
    wide = Anchors([4], [8], (0.5,))(Images(), [torch.zeros(2, 1, 1, 1)])[0]  # 32² pixels, not rounded
    assert wide[0].tolist() == pytest.approx([-(512**0.5), -(128**0.5), 512**0.5, 128**0.5])
    assert first[1].tolist() == [-16, -16, 16, 16]
    assert first[2].tolist() == [0, -8, 16, 8]  # one cell to the right
    assert first[-2].tolist() == [32 - 16, 32 - 16, 32 + 16, 32 + 16]
    points = Anchors([8], [1], (1.0,), offset=0.5)(Images(), [torch.zeros(2, 1, 2, 2)])[0]
    assert ((points[:, :2] + points[:, 2:]) / 2).tolist() == [[4, 4], [12, 4], [4, 12], [12, 12]]


def test_pooling_does_not_depend_on_what_was_seen_first() -> None:
    """Left to torchvision, an odd first batch would decide the scales of the pyramid for good."""
    one, other = make("mask_rcnn").eval(), make("mask_rcnn").eval()
    odd, usual = torch.rand(3, 17, 100), torch.rand(3, 64, 64)
    one.detect(odd)
    torch.testing.assert_close(one.detect(usual)["boxes"], other.detect(usual)["boxes"], rtol=0, atol=0)


def test_backbones_and_channels_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="MobileNetV2 has no maps"):
        build_detector("fcos", backbones.build("mobilenet_v2"), 3, HEAD)
    odd = HeadConfig(fpn_channels=48, tower_norm="group")
    with pytest.raises(UserError, match="multiple of 32"):
        build_detector("retinanet", backbones.build("resnet18", "small", 0.125), 3, odd)


@pytest.mark.parametrize(
    ("name", "options", "strides"),
    [
        ("timm/test_resnet", (), (4, 8, 16, 32)),
        ("timm/test_efficientnet", (), (4, 8, 16, 32)),
        ("timm/test_convnext", (), (4, 8, 16, 32)),
        ("timm/test_nfnet", (), (4, 8, 16, 32)),  # its maps cannot be asked for
        ("timm/test_vit", ("patch_size=8",), (2, 4, 8, 16)),
        ("timm/vit_tiny_patch16_224", ("depth=1", "img_size=32"), (4, 8, 16, 32)),
    ],
)
def test_maps_of_timms_networks(name: str, options: tuple[str, ...], strides: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    encoder = backbones.of(backbones.for_any_size(Architecture(name, "imagenet", 1.0, options)))
    names = {f"encoder.{key}" for key in encoder.state_dict()}
    maps = maps_of(encoder)
    assert maps.strides == strides
    assert {key for key in maps.state_dict() if key.startswith("encoder.")} == names  # the encoder itself
    found = maps.train()(torch.rand(2, 3, 64, 96))
    shapes = [(2, c, 64 // s, 96 // s) for c, s in zip(maps.channels, strides, strict=True)]
    assert [tuple(m.shape) for m in found] == shapes
    torch.stack([m.sum() for m in found]).sum().backward()
    # What is trained gets a gradient, and what does not is behind the last map.
    trained = {n for n, p in maps.named_parameters() if p.requires_grad}
    assert trained == {n for n, p in maps.named_parameters() if p.grad is not None}
    assert len(trained) >= 0.9 * len(list(maps.parameters()))
    if "vit" in name:  # the tokens of the network, at their own stride
        encoder.eval()
        with torch.no_grad():
            tokens = encoder.forward_features(torch.ones(1, 3, 64, 64))[:, encoder.num_prefix_tokens :]
            level = maps.eval()(torch.ones(1, 3, 64, 64))[2]
        torch.testing.assert_close(level.flatten(2).mT, tokens)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm/shvit_s1", "The backbone has 3 maps, but this detector needs 4"),
        ("timm/vit_tiny_patch16_224", "VisionTransformer does not take images of every size"),
        ("mnasnet0_5", "MNASNet has no maps"),
    ],
)
def test_networks_without_maps_are_refused(name: str, message: str) -> None:
    with torch.device("meta"):
        encoder = backbones.create(name)
    with pytest.raises(UserError, match=message):
        build_detector("mask_rcnn", encoder, 3, HEAD)


def test_a_detector_on_a_plain_vit_trains() -> None:
    torch.manual_seed(0)
    encoder = backbones.build("timm/test_vit", options=("patch_size=8", "depth=2"))
    detector = Detector(build_detector("mask_rcnn", encoder, 3, HEAD), 64, 128).train()
    output = detector([torch.rand(3, 64, 64), torch.rand(3, 60, 50)], targets())  # type: ignore[arg-type]
    output.loss.backward()
    assert [n for n, p in detector.named_parameters() if p.requires_grad and p.grad is None] == []
