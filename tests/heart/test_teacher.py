"""`MomentumTeacher` alone, as a stranger's loop uses it, against plain torch networks."""

import copy

import pytest
import torch
from oracle import follow, moments, norms, with_norms
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from momentum2 import MomentumTeacher
from momentum2._torchvision import torchvision
from momentum2.backbones import build
from momentum2.config import Config, DataConfig, MethodConfig, ModelConfig, TrainConfig
from momentum2.training.build import build_method
from momentum2.training.plan import resolve

M = 0.3


def network(backbone: str) -> nn.Module:
    """A thin torchvision network in fp64, no two channels of whose norms are alike."""
    torch.manual_seed(0)
    made = build(backbone, "small", 0.125).double()
    for norm in batch_norms(made).values():
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.3)
    return made


def batch_norms(module: nn.Module) -> dict[str, _BatchNorm]:
    return {name: m for name, m in module.named_modules() if isinstance(m, _BatchNorm)}


def images(seed: int, n: int = 8, size: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    light = torch.randn(n, 3, 1, 1, generator=generator, dtype=torch.float64)
    return light + torch.randn(n, 3, size, size, generator=generator, dtype=torch.float64)


def nudge(student: nn.Module, seed: int) -> None:
    """Another step of some optimizer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in student.parameters():
            p += 0.1 * p.std() * torch.randn(p.shape, generator=generator, dtype=p.dtype)


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, rtol=0, atol=1e-9 * right.abs().max().item())


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.064, 0.01])
@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_the_first_step_is_batch_norm_and_gives_the_first_history(backbone: str, alpha: float):
    student = network(backbone)
    plain = copy.deepcopy(student).train()
    seen: dict[str, list[Tensor]] = {name: [] for name in batch_norms(plain)}
    for name, norm in batch_norms(plain).items():
        norm.register_forward_pre_hook(lambda _, inputs, name=name: seen[name].append(inputs[0].detach()))
    teacher = MomentumTeacher(student)
    teacher.alpha = alpha
    for view in (images(1), images(2)):
        close(teacher(view), plain(view).detach())
    teacher.update(student, weight=M)
    for name, inputs in seen.items():
        assert len(inputs) == 2
        of_views = [moments(x.unsqueeze(0)) for x in inputs]
        means, variances = teacher.network.get_submodule(name).histories()
        close(means, (of_views[0][0] + of_views[1][0]) / 2)
        close(variances, (of_views[0][1] + of_views[1][1]) / 2)


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.064, 0.01])
@pytest.mark.parametrize("backbone", ["resnet18", "resnet50"])
def test_later_steps_are_the_oracles(backbone: str, alpha: float, trained: bool):
    """The statistics of a trained student are a history from the start."""
    student = network(backbone)
    if trained:
        student.train()(images(0))
    teacher = MomentumTeacher(student)
    right = with_norms(student, "momentum", devices=1)
    teacher.alpha = alpha
    for norm in norms(right).values():
        assert norm.has_history == trained
        norm.alpha = alpha
    for k in range(4):
        for view in (images(2 * k + 1), images(2 * k + 2)):
            close(teacher(view), right(view).detach())
        nudge(student, k)
        teacher.update(student, weight=M)
        follow(right, student, M)
        for norm in norms(right).values():
            norm.commit()
    state = teacher.encoder_state()
    for name, p in right.named_parameters():
        close(state[name], p.detach())
    for name, norm in norms(right).items():
        means, variances = teacher.network.get_submodule(name).histories()
        close(means, norm.means)
        close(variances, norm.vars)
        close(state[f"{name}.running_mean"], norm.means[0])
        close(state[f"{name}.running_var"], norm.vars[0])


def efficientnet() -> nn.Module:
    torch.manual_seed(0)
    return torchvision.models.efficientnet_b0()


def test_nothing_random_happens_in_the_teacher():
    """EfficientNet drops whole blocks at random while it trains, and features before its classifier."""
    student, x = efficientnet().train().double(), images(1)
    assert not torch.allclose(student(x), student(x))
    teacher = MomentumTeacher(student)
    targets = teacher(x)
    assert torch.equal(teacher(x), targets)
    assert torch.equal(teacher.eval().train()(x), targets)  # and still by the statistics of the batch:
    assert not torch.allclose(teacher.eval()(x), targets)
    plain = copy.deepcopy(student).eval()
    for norm in batch_norms(plain).values():
        norm.train()
    close(targets, plain(x).detach())


def test_nothing_random_happens_in_the_teacher_of_a_method():
    config = Config(
        method=MethodConfig("byol", student_norm="local"),
        model=ModelConfig("efficientnet_b0", projector_hidden=16, projector_out=8),
        data=DataConfig("shapes", image_size=32),
        train=TrainConfig(steps=1, batch_size=8, devices=2),
    )
    method = build_method(config, resolve(config, 8, 1), 0).train()
    x = images(1).float()
    teacher, student = method.get_submodule("teacher"), method.get_submodule("student")
    assert torch.equal(teacher(x), teacher(x))
    assert not torch.allclose(student(x), student(x))


def test_ema_norms_are_two_plain_networks_by_emans_rule():
    student = network("resnet18")
    plain_student, plain_teacher = copy.deepcopy(student).train(), copy.deepcopy(student).eval()
    student.train()
    teacher = MomentumTeacher(student, norm="ema")
    assert teacher.training
    optimizers = [
        torch.optim.SGD(s.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        for s in (student, plain_student)
    ]

    def step(student: nn.Module, teacher: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> Tensor:
        v, w = images(2 * k), images(2 * k + 1)
        with torch.no_grad():
            targets = [teacher(v), teacher(w)]
        outputs = [student(w), student(v)]
        loss = sum((q - z).square().mean() for q, z in zip(outputs, targets, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for k in range(10):
        ours = step(student, teacher, optimizers[0], k)
        close(ours, step(plain_student, plain_teacher, optimizers[1], k))
        teacher.update(student, weight=M)
        theirs = plain_student.state_dict()
        for name, t in plain_teacher.state_dict().items():
            s = theirs[name]
            t.copy_((1 - M) * t + M * s if t.is_floating_point() else s)
    state = teacher.encoder_state()
    assert state.keys() == plain_teacher.state_dict().keys()
    for name, right in plain_teacher.state_dict().items():
        if right.is_floating_point():
            close(state[name], right)
        else:
            assert torch.equal(state[name], right), name
    assert int(state["bn1.num_batches_tracked"]) == 20
