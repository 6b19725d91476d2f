"""Encoders keep torchvision's names and initial weights; weights load strictly and safely."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from momentum2 import backbones
from momentum2._torchvision import torchvision
from momentum2.errors import SettingError, UserError
from momentum2.weights import Architecture

models = torchvision.models


def output_of(encoder: nn.Module, side: int) -> torch.Tensor:
    with torch.no_grad():
        return encoder.eval()(torch.randn(2, 3, side, side))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_resnet_is_torchvisions_without_fc(name: str) -> None:
    torch.manual_seed(0)
    encoder = backbones.build(name)
    torch.manual_seed(0)
    reference = models.get_model(name, weights=None)
    expected = {k: v for k, v in reference.state_dict().items() if not k.startswith("fc.")}
    state = encoder.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[k], expected[k]) for k in expected)  # also: no BN statistic has moved
    assert encoder.training
    assert encoder.feature_dim == reference.fc.in_features
    reference.fc = nn.Identity()
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(encoder.eval()(x), reference.eval()(x), rtol=0, atol=0)


def test_resnet10_is_resnet18_with_one_block_a_stage() -> None:
    torch.manual_seed(0)
    state = backbones.build("resnet10").state_dict()
    expected = {k: v.shape for k, v in backbones.build("resnet18").state_dict().items()}
    one = {k: s for k, s in expected.items() if not (k.startswith("layer") and k.split(".")[1] == "1")}
    assert {k: v.shape for k, v in state.items()} == one
    narrow = backbones.build("resnet10", "small", 0.375, zero_init_residual=True)
    assert [getattr(narrow, f"layer{i}")[0].conv2.out_channels for i in range(1, 5)] == [24, 48, 96, 192]
    assert output_of(narrow, 32).shape == (2, narrow.feature_dim) == (2, 192)


@pytest.mark.parametrize(
    ("stem", "width", "count"), [("small", 0.375, 12), ("cifar", 1.0, 27), ("imagenet", 0.5, 16)]
)
def test_a_stem_of_cosines_is_a_whitening_basis(stem: str, width: float, count: int) -> None:
    """Orthonormal, each with its negative; what is left of the layer, and all other layers, are as ever."""
    torch.manual_seed(0)
    encoder = backbones.build("resnet10", stem, width, stem_init="cosines")
    torch.manual_seed(0)
    plain = backbones.build("resnet10", stem, width)
    weight = encoder.conv1.weight.detach()
    first, second = weight[:count].flatten(1), weight[count : 2 * count].flatten(1)
    assert torch.equal(first, -second)
    torch.testing.assert_close(first @ first.T, torch.eye(count), atol=1e-5, rtol=0)
    assert torch.equal(weight[2 * count :], plain.conv1.weight[2 * count :])
    others = zip(encoder.named_parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(a, b) for (name, a), b in others if name != "conv1.weight")
    # The first is gray and constant; a smooth picture has less variance in each later one than in it.
    torch.testing.assert_close(first[0], torch.full_like(first[0], first.shape[1] ** -0.5))
    ramp = torch.linspace(-1, 1, 32).expand(3, 32, 32)[None]
    found = nn.functional.conv2d(ramp, weight[:count]).var((0, 2, 3))
    assert found[0] > 10 * found[1:].max()


def test_cosines_are_for_resnets() -> None:
    with pytest.raises(UserError, match="is only for ResNets, not 'vgg11_bn'"):
        backbones.build("vgg11_bn", stem_init="cosines")


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_residual_branches_of_zero_are_torchvisions(name: str) -> None:
    torch.manual_seed(0)
    encoder = backbones.build(name, zero_init_residual=True)
    torch.manual_seed(0)
    reference = models.get_model(name, weights=None, zero_init_residual=True).state_dict()
    assert all(torch.equal(value, reference[key]) for key, value in encoder.state_dict().items())
    assert any(not value.any() for key, value in encoder.named_parameters() if key.endswith(".weight"))


@pytest.mark.parametrize(("name", "last"), [("resnet18", "bn2"), ("resnext50_32x4d", "bn3")])
def test_reshaped_resnets_have_residual_branches_of_zero_too(name: str, last: str) -> None:
    encoder = backbones.build(name, "small", 0.5, zero_init_residual=True)
    blocks = [block for i in range(1, 5) for block in getattr(encoder, f"layer{i}")]
    assert blocks
    for block in blocks:
        assert not getattr(block, last).weight.any()
        assert block.bn1.weight.all()
        x = torch.randn(2, block.conv1.in_channels, 8, 8)
        shortcut = block.downsample(x) if block.downsample is not None else x
        torch.testing.assert_close(block(x), shortcut.clamp(min=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "feature_dim"),
    [
        ("densenet121", 1024),
        ("efficientnet_b0", 1280),
        ("googlenet", 1024),
        ("inception_v3", 2048),
        ("mnasnet0_5", 1280),
        ("mobilenet_v2", 1280),
        ("mobilenet_v3_small", 576),
        ("regnet_x_400mf", 400),
        ("regnet_y_400mf", 440),
        ("resnext50_32x4d", 2048),
        ("shufflenet_v2_x0_5", 1024),
        ("vgg11_bn", 512),
    ],
)
def test_families(name: str, feature_dim: int) -> None:
    encoder = backbones.build(name)
    counters = [b for n, b in encoder.named_buffers() if n.endswith("num_batches_tracked")]
    assert counters
    assert all(c == 0 for c in counters)
    assert encoder.feature_dim == feature_dim
    x = torch.randn(2, 3, 96, 96)
    features = encoder(x)  # training mode
    assert features.shape == (2, feature_dim)
    features.square().sum().backward()
    assert all(p.grad is not None for p in encoder.parameters())  # nothing of the classifier is left


@pytest.mark.parametrize("name", ["resnet18", "regnet_x_400mf"])
def test_an_encoder_can_be_built_without_storage(name: str) -> None:
    with torch.device("meta"):
        encoder = backbones.build(name)
    assert {t.device.type for t in encoder.state_dict().values()} == {"meta"}
    assert encoder.feature_dim == {"resnet18": 512, "regnet_x_400mf": 400}[name]


@pytest.mark.parametrize(("stem", "map_side"), [("imagenet", 16), ("cifar", 64), ("small", 32)])
def test_stems(stem: str, map_side: int) -> None:
    encoder = backbones.build("resnet18", stem=stem)
    seen = []
    encoder.layer1.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert output_of(encoder, 64).shape == (2, 512)
    assert seen[0] == (2, 64, map_side, map_side)
    assert encoder.state_dict().keys() == backbones.build("resnet18").state_dict().keys()


@pytest.mark.parametrize(("name", "width"), [("resnet18", 0.25), ("resnet18", 2), ("resnext50_32x4d", 0.5)])
def test_width_multiplies_every_channel_count(name: str, width: float) -> None:
    with torch.device("meta"):
        plain, scaled = backbones.build(name), backbones.build(name, stem="small", width=width)
    assert scaled.feature_dim == plain.feature_dim * width
    a, b = plain.state_dict(), scaled.state_dict()
    assert list(a) == list(b)
    for key in a:
        if a[key].dim() > 0:
            assert b[key].shape[0] == a[key].shape[0] * width, key


def test_scaled_resnets_start_like_torchvisions() -> None:
    torch.manual_seed(0)
    encoder = backbones.build("resnet18", stem="cifar", width=0.5)
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet5"}, "resnet50"),
        ({"name": "my_network"}, "command backbones lists all names"),
        (
            {"name": "resnet10t"},
            r"torchvision has no backbone 'resnet10t', but timm has. Write timm/resnet10t\.",
        ),
        ({"name": "torchvision/test_vit.r160_in1k"}, r"Write timm/test_vit.r160_in1k\."),
        ({"name": "pit_ti_242"}, "Did you mean timm/pit_ti_224"),
        ({"name": "timm/vit_tiny_patch16_244"}, "timm has no backbone.*Did you mean vit_tiny_patch16_224"),
        ({"name": "timm/resnet18.a1_in2k"}, "timm has no backbone.*Did you mean resnet18.a1_in1k"),
        ({"name": "timm/hf-hub:timm/resnet18.a1_in1k"}, "timm has no backbone"),
        ({"name": "timm/local-dir:/etc"}, "timm has no backbone"),
        ({"name": "hf-hub:timm/resnet18"}, "torchvision has no backbone"),
        ({"name": "timm/../resnet18"}, "timm has no backbone"),
        ({"name": "timm/torchvision/resnet18"}, "timm has no backbone"),
        ({"name": "os.system\n(1)"}, "torchvision has no backbone"),
        ({"name": "timm/test_vit", "width": 0.5}, "Only torchvision's ResNets"),
        ({"name": "timm/test_vit", "zero_init_residual": True}, "Only torchvision's ResNets"),
        ({"name": "timm/test_resnet", "options": ["depth=3"]}, "unexpected keyword argument 'depth'"),
        ({"name": "timm/test_vit", "options": ["pretrained=true"]}, "which other settings decide"),
        ({"name": "timm/test_vit", "options": ["checkpoint_path=x.pth"]}, "which other settings decide"),
        ({"name": "resnet18", "options": ["weights=DEFAULT"]}, "which other settings decide"),
        ({"name": "timm/test_vit", "options": ["patch_size"]}, "^model.options takes NAME=VALUE"),
        ({"name": "timm/test_vit", "options": ["depth=3", "depth=4"]}, "has depth twice"),
        (
            {"name": "timm/inception_next_atto"},
            "^timm/inception_next_atto has no features without its classifier",
        ),
        ({"name": "mobilenet_v2", "stem": "cifar"}, "Only ResNets"),
        ({"name": "mobilenet_v2", "width": 0.5}, "Only ResNets"),
        (
            {"name": "mobilenet_v2", "zero_init_residual": True},
            "^model.zero_init_residual is only for ResNets",
        ),
        ({"name": "resnet18", "width": 0.3}, "whole channel"),
        ({"name": "resnet18", "width": 0.0}, "whole channel"),
        ({"name": "resnext50_32x4d", "width": 0.125}, "whole channel"),
    ],
)
def test_wrong_wishes_are_one_sentence(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        backbones.build(**arguments)


@pytest.mark.parametrize(
    "name", ["test_vit", "test_convnext", "test_efficientnet", "test_byobnet", "test_nfnet", "test_mambaout"]
)
def test_timms_networks_are_timms_without_classifier(name: str) -> None:
    import timm

    torch.manual_seed(0)
    encoder = backbones.build(f"timm/{name}", channels=5)
    torch.manual_seed(0)
    reference = timm.create_model(name, num_classes=0, in_chans=5)
    state, expected = encoder.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    x = torch.randn(2, 5, 96, 96)
    with torch.no_grad():
        features = encoder.eval()(x)
        assert torch.equal(features, reference.eval()(x))
    assert features.shape == (2, encoder.feature_dim)


@pytest.mark.parametrize(
    ("name", "options", "sizes", "told"),
    [
        ("timm/test_resnet", (), (33, 20), ()),
        ("timm/test_vit", (), (32,), ()),  # its positions follow the size
        ("timm/vit_tiny_patch16_224", ("depth=1",), (224,), ()),
        ("timm/vit_tiny_patch16_224", ("depth=1",), (32,), ("img_size=32",)),
        ("timm/vit_tiny_patch16_224", ("depth=1", "patch_size=4"), (32,), ("img_size=32",)),
        ("timm/vit_tiny_patch16_224", ("depth=1",), (64, 32), ("img_size=64", "dynamic_img_size=true")),
        ("torchvision/vit_b_16", (), (32,), ("image_size=32",)),
        ("torchvision/swin_t", (), (32,), ()),
        ("convnext_tiny", (), (32,), ()),
        ("mnasnet0_5", (), (32,), ()),
    ],
)
def test_a_network_is_built_for_the_size(
    name: str, options: tuple[str, ...], sizes: tuple[int, ...], told: tuple[str, ...]
) -> None:
    facts = backbones.inspect(Architecture(name, "imagenet", 1.0, options), sizes)
    assert facts.architecture.options == options + told
    assert facts.unused == ()
    with torch.device("meta"):
        encoder = backbones.of(facts.architecture)
        for size in sizes:
            assert encoder(torch.empty(2, 3, size, size)).shape == (2, facts.feature_dim)
    assert facts.parameters == sum(p.numel() for p in encoder.parameters())
    assert encoder.feature_dim == facts.feature_dim
    assert (facts.batch_norms > 0) == (name in ("timm/test_resnet", "mnasnet0_5"))


@pytest.mark.parametrize(
    ("name", "sizes", "setting", "close"),
    [
        ("timm/efficientformer_l1", (64,), "data.image_size", 224),
    ],
)
def test_a_size_that_a_network_cannot_take(
    name: str, sizes: tuple[int, ...], setting: str, close: int
) -> None:
    with pytest.raises(
        SettingError, match=rf"does not work with {name} .*nearest size that it takes is {close}"
    ) as e:
        backbones.inspect(Architecture(name, "imagenet", 1.0), sizes)
    assert e.value.setting == setting


def test_parameters_without_gradient_are_found() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(27, 4), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x.flatten(1))

    facts = backbones.inspect_given(Odd(), (3,), 3, "own")
    assert facts.unused == ("idle.weight", "idle.bias")
    assert facts.feature_dim == 4
    with pytest.raises(UserError, match="Odd does not take images of 4 px"):
        backbones.inspect_given(Odd(), (4,), 3, "own")


def test_a_resnet_takes_other_channels() -> None:
    encoder = backbones.build("resnet18", "small", 0.25, channels=13)
    assert encoder.eval()(torch.randn(2, 13, 16, 16)).shape == (2, 128)
    assert encoder.conv1.weight.std().item() == pytest.approx((2 / (16 * 9)) ** 0.5, rel=0.1)


def test_names_are_listed() -> None:
    assert backbones.listed("vit_tiny_patch16_224") == ["timm/vit_tiny_patch16_224"]
    assert set(backbones.listed("resnet18")) == {"torchvision/resnet18", "timm/resnet18"}
    assert backbones.listed("torchvision/swin*") == [
        f"torchvision/swin_{kind}" for kind in ("b", "s", "t", "v2_b", "v2_s", "v2_t")
    ]
    assert len(backbones.listed()) > 1000
    assert backbones.listed("[") == []


def test_timm_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match=r"timm is not installed. Run pip install 'momentum2\[timm\]'"):
        backbones.build("timm/test_vit")
    with pytest.raises(UserError, match="torchvision has no backbone 'test_vit'"):
        backbones.build("test_vit")
    assert backbones.listed("resnet18") == ["torchvision/resnet18"]


@pytest.fixture
def source() -> nn.Module:
    """A whole torchvision network, classifier included, with statistics that are not the initial ones."""
    network = models.resnet18(weights=None)
    network(torch.randn(4, 3, 32, 32))
    return network


def same(encoder: nn.Module, source: nn.Module) -> bool:
    expected = source.state_dict()
    return all(torch.equal(v, expected[k]) for k, v in encoder.state_dict().items())


@pytest.mark.parametrize("with_fc", [True, False])
def test_weights_load_from_both_formats(tmp_path: Path, source: nn.Module, with_fc: bool) -> None:
    state = {k: v for k, v in source.state_dict().items() if with_fc or not k.startswith("fc.")}
    torch.save(state, tmp_path / "w.pth")
    save_file(state, tmp_path / "w.safetensors", metadata={"backbone": "resnet18"})
    for file in ("w.pth", "w.safetensors"):
        encoder = backbones.build("resnet18")
        assert not same(encoder, source)
        backbones.load_weights(encoder, tmp_path / file)
        assert same(encoder, source)


def test_old_files_without_batch_counters_load(tmp_path: Path, source: nn.Module) -> None:
    state = {k: v for k, v in source.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "old.pth")
    encoder = backbones.build("resnet18")
    backbones.load_weights(encoder, str(tmp_path / "old.pth"))
    assert torch.equal(encoder.bn1.running_mean, source.bn1.running_mean)
    assert encoder.bn1.num_batches_tracked == 0


def test_every_kind_of_mismatch_is_listed_and_nothing_is_loaded(tmp_path: Path, source: nn.Module) -> None:
    state = dict(source.state_dict())
    state["conv1.weight"] = torch.zeros(64, 3, 3, 3)
    state["stranger"] = torch.zeros(1)
    del state["layer1.0.conv1.weight"]
    save_file(state, tmp_path / "w.safetensors")
    encoder = backbones.build("resnet18")
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    with pytest.raises(UserError) as caught:
        backbones.load_weights(encoder, tmp_path / "w.safetensors")
    message = str(caught.value)
    assert "1 missing (layer1.0.conv1.weight)" in message
    assert "1 unknown (stranger)" in message
    assert "1 of a different shape (conv1.weight)" in message
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Touch(tmp_path / "ran")}, tmp_path / "evil.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    for file in ("evil.pth", "plain.pth"):
        with pytest.raises(UserError, match="not a readable state dict"):
            backbones.load_weights(backbones.build("resnet18"), tmp_path / file)
    assert not (tmp_path / "ran").exists()


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    encoder = backbones.build("resnet18")
    (tmp_path / "empty.pth").touch()
    (tmp_path / "text.pth").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "foreign.pth")
    for file in ("absent.pth", "empty.pth", "text.pth", "text.safetensors", "foreign.pth"):
        with pytest.raises(UserError, match=file):
            backbones.load_weights(encoder, tmp_path / file)
