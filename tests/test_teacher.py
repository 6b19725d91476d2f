"""The teacher: weight EMA by name, commit, and what a stranger's training loop needs."""

import copy
import math

import pytest
import torch
from torch import nn

from momentum2 import LocalBatchNorm, MomentumBatchNorm, MomentumTeacher, convert_norms
from momentum2.errors import UserError


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(width * 9, 4), nn.BatchNorm1d(4))
        self.register_buffer("center", torch.ones(4))

    def forward(self, x):
        return self.head(self.encoder(x)) - self.center


@pytest.fixture
def student():
    torch.manual_seed(0)
    return Net()


def images(seed=0, n=8):
    return torch.randn(n, 3, 5, 5, generator=torch.Generator().manual_seed(seed))


def nudge(student):
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.1)


def test_copies_converts_and_freezes(student):
    teacher = MomentumTeacher(student)
    assert sum(isinstance(m, MomentumBatchNorm) for m in teacher.modules()) == 2
    assert not any(p.requires_grad for p in teacher.parameters())
    assert teacher.training
    assert teacher.alpha == 1.0
    assert not any(isinstance(m, MomentumBatchNorm) for m in student.modules())
    z = teacher(images())
    assert not z.requires_grad
    torch.testing.assert_close(z, student(images()).detach())


def test_weights_are_the_moving_average(student):
    teacher = MomentumTeacher(student)
    expected = {name: p.detach().double() for name, p in student.named_parameters()}
    for m in (0.5, 0.01, 0.0, 1.0, 0.3):
        nudge(student)
        teacher.update(student, weight=m)
        for name, p in student.named_parameters():
            expected[name] = (1 - m) * expected[name] + m * p.detach().double()
    for name, p in teacher.network.named_parameters():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_update_at_weight_one_is_the_student(student):
    teacher = MomentumTeacher(student)
    nudge(student)
    teacher.update(student, weight=1.0)
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), student.parameters(), strict=True))


def test_statistics_of_a_network_over_steps(student):
    """The first norm's input depends on the weights alone, so that the formula can be written by hand."""
    teacher = MomentumTeacher(student)
    conv, m = copy.deepcopy(student.encoder[0]).double(), 0.2
    mean, var = torch.zeros(6).double(), torch.ones(6).double()
    for k in range(4):
        alpha = (math.cos(math.pi * k / 4) + 1) / 2
        teacher.alpha = alpha
        views = images(2 * k), images(2 * k + 1)
        for view in views:
            teacher(view)
        with torch.no_grad():
            features = [conv(view.double()).transpose(0, 1).flatten(1) for view in views]
        mean = alpha * sum(f.mean(1) for f in features) / 2 + (1 - alpha) * mean
        var = alpha * sum(f.var(1, correction=0) for f in features) / 2 + (1 - alpha) * var
        nudge(student)
        teacher.update(student, weight=m)
        with torch.no_grad():
            for ours, theirs in zip(conv.parameters(), student.encoder[0].parameters(), strict=True):
                ours.copy_((1 - m) * ours + m * theirs.double())
    norm = teacher.network.encoder[1]
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), var, rtol=1e-5, atol=1e-6)


def test_statistics_given_to_update_are_used_and_stay(student):
    teacher, other = MomentumTeacher(student), MomentumTeacher(student)
    for t in (teacher, other):
        t(images(0))
        t.update(student, weight=0.1)
        t(images(1))
    teacher.update(student, weight=0.1, statistics=0.3)
    other.alpha = 0.3
    other.update(student, weight=0.1)
    assert teacher.alpha == other.alpha == pytest.approx(0.3)
    assert torch.equal(teacher(images(2)), other(images(2)))


def test_nothing_is_pending_after_an_update(student):
    teacher = MomentumTeacher(student)
    teacher(images())
    teacher.update(student, weight=0.0)
    state = copy.deepcopy(teacher.state_dict())
    teacher.update(student, weight=0.0)
    assert all(torch.equal(state[name], t) for name, t in teacher.state_dict().items())


@pytest.mark.parametrize(("norm", "devices"), [("local", 1), ("local", 2), ("synced", 1)])
def test_other_norms_keep_running_statistics_of_their_own(student, norm, devices):
    teacher = MomentumTeacher(student, norm=norm, devices=devices)
    teacher.alpha = 0.5
    assert teacher.alpha == 1.0
    teacher(images())
    teacher.update(student, weight=0.5, statistics=0.5)
    student(images()[:4] if devices == 2 else images())
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(
            getattr(teacher.network.encoder[1], name), getattr(student.encoder[1], name), rtol=1e-5, atol=1e-6
        )
    assert teacher.drift() == 0


def test_a_converted_student_is_converted_again(student):
    convert_norms(student, "local", devices=4)
    teacher = MomentumTeacher(student, devices=2)
    assert [m.devices for m in teacher.modules() if isinstance(m, MomentumBatchNorm)] == [2, 2]
    assert sum(isinstance(m, LocalBatchNorm) for m in student.modules()) == 2


def test_a_student_that_is_a_norm():
    student = nn.BatchNorm1d(3)
    teacher = MomentumTeacher(student)
    x = torch.randn(5, 3)
    torch.testing.assert_close(teacher(x), student(x).detach())


def test_starts_in_training_mode_after_a_student_in_evaluation_mode(student):
    teacher = MomentumTeacher(student.eval())
    teacher(images())
    assert teacher.drift() > 0


def test_buffers_of_the_student_are_not_touched(student):
    teacher = MomentumTeacher(student)
    student.center.fill_(7)
    nudge(student)
    teacher.update(student, weight=0.5)
    assert torch.equal(teacher.network.center, torch.ones(4))


def test_parameters_match_by_name_strictly(student):
    teacher = MomentumTeacher(student)
    student.predictor = nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"a different shape: predictor.bias, predictor.weight\."):
        teacher.update(student, weight=0.1)
    del student.predictor, student.head
    with pytest.raises(UserError, match=r"a different shape: head\.0\.bias, head\.0\.weight,"):
        teacher.update(student, weight=0.1)


def test_a_refused_update_changes_nothing(student):
    teacher = MomentumTeacher(student)
    teacher(images())
    before, drift = copy.deepcopy(teacher.state_dict()), teacher.drift()
    for wrong in ({"student": Net(3), "weight": 0.1}, {"student": student, "weight": 1.5}):
        with pytest.raises(UserError):
            teacher.update(**wrong)
    assert all(torch.equal(before[name], t) for name, t in teacher.state_dict().items())
    assert torch.equal(teacher.drift(), drift)


def test_an_unknown_history_is_refused(student):
    with pytest.raises(UserError, match="Choose local or global"):
        MomentumTeacher(student, history="shared")


def test_encoder_state_is_plain_batch_norms(student):
    teacher = MomentumTeacher(student)
    teacher(images())
    teacher.update(student, weight=0.5)
    whole, part = teacher.encoder_state(), teacher.encoder_state("encoder")
    plain = Net()
    plain.load_state_dict(whole, strict=True)
    plain.encoder.load_state_dict(part, strict=True)
    torch.testing.assert_close(plain.eval()(images()), teacher.eval()(images()))
    part["0.weight"].zero_()
    assert teacher.network.encoder[0].weight.any()


def test_resume_is_exact(student):
    def step(teacher, k):
        teacher.alpha = 0.5 / (k + 1)
        out = teacher(images(k))
        teacher.update(student, weight=0.1)
        return out

    teacher = MomentumTeacher(student)
    step(teacher, 0)
    resumed = MomentumTeacher(Net())
    resumed.load_state_dict(teacher.state_dict(), strict=True)
    for k in (1, 2):
        assert torch.equal(step(teacher, k), step(resumed, k))
    assert all(torch.equal(a, b) for a, b in zip(teacher.buffers(), resumed.buffers(), strict=True))


def test_drift_by_hand():
    student = nn.BatchNorm1d(2, eps=0.0)
    student.running_mean.copy_(torch.tensor([1.0, 0.0]))
    student.running_var.copy_(torch.tensor([4.0, 1.0]))
    teacher = MomentumTeacher(student)
    assert teacher.drift() == 0
    teacher(torch.tensor([[0.0, -3.0], [6.0, 3.0]]))  # means 3, 0; std 3, 3
    assert teacher.drift() == pytest.approx(((2 + 1) / 2 + (0 + 2) / 1) / 2)


@pytest.mark.slow
def test_a_compiled_student(student):
    torch._dynamo.reset()
    compiled = torch.compile(student, backend="aot_eager")
    teacher = MomentumTeacher(compiled)
    assert teacher.encoder_state().keys() == student.state_dict().keys()
    nudge(student)
    teacher.update(compiled, weight=1.0)
    assert all(torch.equal(a, b) for a, b in zip(teacher.parameters(), student.parameters(), strict=True))


@pytest.mark.slow
def test_a_compiled_teacher_is_compiled_once(student):
    torch._dynamo.reset()
    teacher, twin = MomentumTeacher(student), MomentumTeacher(student)
    compiled = torch.compile(teacher, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for k, alpha in enumerate((1.0, 0.5, 0.1)):
            teacher.alpha = twin.alpha = alpha
            torch.testing.assert_close(compiled(images(k)), twin(images(k)), rtol=1e-5, atol=1e-5)
            nudge(student)
            teacher.update(student, weight=0.1)
            twin.update(student, weight=0.1)
