"""Every batch norm of real networks becomes another kind, and nothing else changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import momentum2
from momentum2 import LocalBatchNorm, MomentumBatchNorm, SyncedBatchNorm, convert_norms
from momentum2._torchvision import torchvision
from momentum2.errors import UserError
from momentum2.norms.recalibrate import recalibrate

CLASSES = {
    "local": LocalBatchNorm,
    "synced": SyncedBatchNorm,
    "momentum": MomentumBatchNorm,
}

# One of each torchvision family with batch norm, at an input size that it accepts.
FAMILIES = {
    "resnet18": 64,
    "resnext50_32x4d": 64,
    "densenet121": 64,
    "vgg11_bn": 64,
    "mobilenet_v2": 64,
    "mobilenet_v3_small": 64,
    "mnasnet0_5": 64,
    "shufflenet_v2_x0_5": 64,
    "efficientnet_b0": 64,
    "regnet_y_400mf": 64,
    "googlenet": 64,
    "inception_v3": 96,
}


def network(name):
    torch.manual_seed(0)
    if name == "vgg11_bn":  # without the 120 million weights that follow its last norm
        vgg = torchvision.models.vgg
        return vgg.make_layers(vgg.cfgs["A"], batch_norm=True).double()
    inception = name in ("googlenet", "inception_v3")
    options = {"init_weights": False, "aux_logits": False} if inception else {}
    return torchvision.models.get_model(name, weights=None, **options).double()


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4, eps=1e-3, momentum=0.3),
        nn.Flatten(),
        nn.Linear(36, 6),
        nn.BatchNorm1d(6, affine=False),
    )


def norms(module):
    return [m for m in module.modules() if isinstance(m, _BatchNorm)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_torchvision_families(name):
    plain = network(name)
    x = torch.rand(4, 3, FAMILIES[name], FAMILIES[name], dtype=torch.float64)
    converted = copy.deepcopy(plain)
    count = len(norms(plain))
    assert convert_norms(converted, "momentum") == count > 0
    assert all(type(m) is MomentumBatchNorm for m in norms(converted))
    assert list(converted.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        # Training mode at alpha 1 is the original, dropout aside.
        for m in (plain, converted):
            m.train()
            for d in m.modules():
                if "Drop" in type(d).__name__ or "Stochastic" in type(d).__name__:
                    d.eval()
        torch.testing.assert_close(converted(x), plain(x), rtol=1e-6, atol=1e-6)
    plain.load_state_dict(converted.state_dict(), strict=True)


@pytest.mark.parametrize("old", CLASSES)
@pytest.mark.parametrize("new", CLASSES)
def test_any_kind_becomes_any_other(old, new):
    net = small()
    net(torch.randn(4, 3, 5, 5))
    state = copy.deepcopy(net.state_dict())
    assert convert_norms(net, old, devices=2) == 2
    assert convert_norms(net, new, devices=2) == 2
    for key, value in net.state_dict().items():
        assert torch.equal(value, state[key])
    assert list(net.state_dict()) == list(state)
    assert [type(m) for m in norms(net)] == [CLASSES[new]] * 2
    assert [m.eps for m in norms(net)] == [1e-3, 1e-5]
    if new != "momentum" and old != "momentum":
        assert [m.momentum for m in norms(net)] == [0.3, 0.1]
    plain = small()
    plain.load_state_dict(net.state_dict(), strict=True)
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(net.eval()(x), plain.eval()(x))


def test_keeps_parameters_device_dtype_and_flags():
    net = small().double()
    net[1].eval()
    net[1].weight.requires_grad_(False)
    before = dict(net.named_parameters())
    convert_norms(net, "momentum")
    assert all(p is before[name] for name, p in net.named_parameters())
    assert not net[1].weight.requires_grad
    assert [net[1].training, net[4].training] == [False, True]
    assert all(b.dtype == torch.float64 for b in net[1].buffers() if b.is_floating_point())
    assert net(torch.randn(4, 3, 5, 5).double()).dtype == torch.float64
    on_meta = small().to("meta")
    convert_norms(on_meta, "momentum")
    assert all(b.device.type == "meta" for b in on_meta.buffers())


def test_a_norm_used_twice_stays_one():
    shared = nn.BatchNorm1d(3)
    net = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    assert convert_norms(net, "local", devices=2) == 1
    assert net["b"] is net["a"][0]
    assert type(net["b"]) is LocalBatchNorm


def test_torchs_synced_norm_is_converted():
    net = nn.Sequential(nn.SyncBatchNorm(3))
    assert convert_norms(net, "local") == 1
    assert type(net[0]) is LocalBatchNorm


def test_local_norms_of_one_device_are_torchs_own():
    net = small()
    before = norms(net)
    convert_norms(net, "local")
    assert norms(net) == before


@pytest.mark.parametrize(("old", "devices"), [("batch", 1), ("split", 2)])
def test_old_names_are_accepted_with_a_warning(old, devices):
    net = nn.Sequential(nn.SyncBatchNorm(3))
    with pytest.warns(FutureWarning, match=f'"{old}" is now called "local"'):
        convert_norms(net, old, devices=2)
    assert net[0].devices == devices
    with pytest.warns(FutureWarning, match="LocalBatchNorm"):
        assert momentum2.SplitBatchNorm is LocalBatchNorm


def test_trained_statistics_are_history_and_fresh_ones_are_not():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    net[0](torch.randn(8, 3))
    convert_norms(net, "momentum")
    x = torch.randn(8, 3)
    old = net[0].running_mean.clone()
    for norm in net:
        norm.alpha = 0.0
        norm(x)
        norm.commit()
    assert torch.equal(net[0].running_mean, old)
    torch.testing.assert_close(net[1].running_mean, x.mean(0))


class NormAndReLU(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.BatchNorm2d(2), "cannot replace itself"),
        (nn.Sequential(nn.BatchNorm2d(2), NormAndReLU(2)), "NormAndReLU has running statistics"),
        (nn.Sequential(torchvision.ops.FrozenBatchNorm2d(2)), "FrozenBatchNorm2d has running statistics"),
        (nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True)), "InstanceNorm2d has running"),
        (nn.Sequential(nn.LazyBatchNorm2d()), "LazyBatchNorm2d"),
        (nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)), "track_running_stats"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_what_cannot_be_converted_is_refused(module, message):
    before = list(module.modules())
    with pytest.raises(UserError, match=message):
        convert_norms(module, "momentum")
    assert list(module.modules()) == before


def test_a_network_without_batch_norm_has_none_to_convert():
    net = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert convert_norms(net, "momentum") == 0
    with pytest.raises(UserError, match=r'Sequential has no batch norm to convert.*norm="ema"'):
        momentum2.MomentumTeacher(net)


@pytest.mark.parametrize("kind", [*CLASSES, "kept"])
@pytest.mark.parametrize("name", ["test_efficientnet", "test_byobnet"])
def test_timms_norms_keep_their_activation(name, kind):
    import timm

    torch.manual_seed(0)
    plain = timm.create_model(name, num_classes=0).double()
    converted = copy.deepcopy(plain)
    devices = 2 if kind == "local" else 1
    assert convert_norms(converted, "local" if kind == "kept" else kind, devices) == len(norms(plain)) > 0
    assert {type(m) for m in norms(converted)} == (
        {CLASSES[kind]} if kind in CLASSES else {*map(type, norms(plain))}
    )
    assert list(converted.state_dict()) == list(plain.state_dict())
    x = torch.rand(4, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        # Replicas of two devices are two forwards; their running statistics are the first one's.
        expected = torch.cat([copy.deepcopy(plain)(x[2:]), plain(x[:2])][::-1]) if devices == 2 else plain(x)
        torch.testing.assert_close(converted(x), expected, rtol=1e-9, atol=1e-12)
        if kind != "momentum":  # its history is the batch's, not a tenth of it
            torch.testing.assert_close(converted.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-12)
    if kind == "synced":
        for net in (plain, converted):
            net.train()(x).square().sum().backward()
        for (name, p), q in zip(plain.named_parameters(), converted.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_a_dropout_inside_a_norm_is_the_students_alone():
    from timm.layers import BatchNormAct2d

    student = nn.Sequential(BatchNormAct2d(4, drop_layer=nn.Dropout, act_layer=nn.PReLU, inplace=False))
    x = torch.randn(8, 4, 3, 3)
    for norm in ("momentum", "local", "ema"):
        teacher = momentum2.MomentumTeacher(student, norm)
        assert torch.equal(teacher(x), teacher(x))
        assert "network.0.act.weight" in dict(teacher.named_parameters())
    convert_norms(student, "local", devices=2)
    assert not torch.equal(student(x), student(x))
    student.eval()
    recalibrate(student, [x, x])
    assert not any(m.training for m in student.modules())


def test_an_unknown_kind_is_refused():
    with pytest.raises(UserError, match=r"'ghost'. Choose local, synced or momentum"):
        convert_norms(small(), "ghost")
