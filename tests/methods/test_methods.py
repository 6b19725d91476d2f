"""Whole steps of each method against the same networks called plainly, in the paper's own order."""

import copy
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from momentum2 import MomentumBatchNorm
from momentum2.backbones import build
from momentum2.config import OWN, Config, MethodConfig, MethodName, ModelConfig, TrainConfig
from momentum2.methods import BYOL, METHODS, Method, MoCo, SimCLR, SimSiam, Supervised
from momentum2.schedules import Schedule, cosine

SCHEDULE = Schedule(K=10, lr_base=0.1, m_base=0.4, alpha_base=0.8)
CLASSES = 3


def make(name: str, devices: int = 1, **method: object) -> Method:
    config = Config(
        method=MethodConfig(name, **method),
        model=ModelConfig(projector_hidden=16, projector_out=8, predictor_hidden=12),
        train=TrainConfig(seed=3),
    )
    torch.manual_seed(0)
    made = METHODS[name](config, SCHEDULE, build("resnet18", "small", 0.125), devices, CLASSES)
    return made.train()


def test_every_method_has_its_name_among_the_settings():
    """Two lines for one method: help lists the names without importing torch."""
    assert (*METHODS, OWN) == get_args(MethodName)


def disturb(*networks: nn.Module) -> None:
    """Random weights of the norms too, so that no two networks or channels are alike."""
    with torch.no_grad():
        for network in networks:
            for p in network.parameters():
                p.add_(0.3 * p.std().nan_to_num(1.0) * torch.randn_like(p) + 0.05 * torch.randn_like(p))


def views(count: int = 2, n: int = 4, seed: int = 1) -> list[Tensor]:
    """Images of their own for each view, the third and later ones small."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [16, 16] + [8] * (count - 2)
    return [torch.randn(n, 3, size, size, generator=generator) * (1 + i) for i, size in enumerate(sizes)]


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """cos(a_i, b_i) for each row, as written."""
    return torch.stack([x @ y / (x.norm() * y.norm()) for x, y in zip(a, b, strict=True)])


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=1, keepdim=True)


def norms(module: nn.Module) -> list[MomentumBatchNorm]:
    return [m for m in module.modules() if isinstance(m, MomentumBatchNorm)]


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    """Parameter by parameter, up to rounding, which few values per channel make large in batch norm."""
    for (name, p), q in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is not None) is p.requires_grad, name
        if p.grad is None:
            continue
        error, size = (p.grad - q[1].grad).norm(), q[1].grad.norm()
        assert error < 1e-3 * size + 1e-5, (name, float(error), float(size))


def byol(**method: object) -> BYOL:
    """A BYOL in the middle of its training: teacher and student differ, and there is a history."""
    made = make("byol", **method)
    assert isinstance(made, BYOL)
    disturb(made.student, made.predictor, made.teacher)
    made.before_step(0)
    made(views(seed=9), None)
    made.after_step(0)
    return made


def test_byol_loss_is_symmetric_over_the_two_views():
    """L = [2 − 2cos(q(v), z'(v'))] + [2 − 2cos(q(v'), z'(v))]."""
    method, (v1, v2) = byol(), views()
    method.before_step(4)
    student, predictor, teacher = (
        copy.deepcopy(x) for x in (method.student, method.predictor, method.teacher)
    )
    q1, q2 = predictor(student(v1)), predictor(student(v2))
    with torch.no_grad():
        z1, z2 = teacher.network(v1), teacher.network(v2)
    terms = [(2 - 2 * cosines(q1, z2)).mean(), (2 - 2 * cosines(q2, z1)).mean()]
    wrong = [(2 - 2 * cosines(q1, z1)).mean(), (2 - 2 * cosines(q2, z2)).mean()]
    output = method([v1, v2], None)
    torch.testing.assert_close(output.loss, sum(terms))
    torch.testing.assert_close(output.z, z1)
    # None of these would pass for another: the terms, the views' own targets, the student's outputs.
    assert abs(terms[0] - terms[1]) > 0.01
    assert abs(sum(wrong) - sum(terms)) > 0.01
    assert not torch.allclose(z1, student(v1), atol=0.1)


def test_byol_small_crops_predict_both_targets():
    method, (v1, v2, small) = byol(), views(3)
    student, predictor, teacher = (
        copy.deepcopy(x) for x in (method.student, method.predictor, method.teacher)
    )
    q1, q2, q3 = (predictor(student(v)) for v in (v1, v2, small))
    z1, z2 = teacher.network(v1), teacher.network(v2)
    large = (2 - 2 * cosines(q1, z2)).mean() + (2 - 2 * cosines(q2, z1)).mean()
    both = (2 - 2 * cosines(q3, z1)).mean() / 2 + (2 - 2 * cosines(q3, z2)).mean() / 2
    torch.testing.assert_close(method([v1, v2, small], None).loss, large + both)


def test_byol_with_repulsion_and_without_predictor():
    """The student's outputs find the teacher's; no gradient flows through the outputs that they are pushed from."""
    method, (v1, v2), t = byol(repulsion="batch", predictor=False, temperature=0.4), views(), 0.4
    assert not list(method.predictor.parameters())
    student = copy.deepcopy(method.student)
    teacher = copy.deepcopy(method.teacher)
    with torch.no_grad():
        targets = [unit(teacher.network(v)) for v in (v1, v2)]
    own = [unit(student(v)) for v in (v1, v2)]
    terms = []
    for q, z in ((own[0], targets[1]), (own[1], targets[0])):
        for i in range(4):
            near = [q[i] @ z[j] / t for j in range(4)]
            away = [q[i] @ x[j].detach() / t for x in own for j in range(4) if j != i]
            terms.append(torch.stack([*near, *away]).logsumexp(0) - near[i])
    expected = torch.stack(terms).sum() / 4  # the mean over images, the sum over views
    output = method([v1, v2], None)
    torch.testing.assert_close(output.loss, expected)
    expected.backward()
    output.loss.backward()
    same_gradients(method.student, student)
    assert not any(p.requires_grad or p.grad is not None for p in method.teacher.parameters())


def test_byol_gradient_reaches_student_and_predictor_only():
    method, (v1, v2) = byol(), views()
    student, predictor = copy.deepcopy(method.student), copy.deepcopy(method.predictor)
    z1, z2 = (copy.deepcopy(method.teacher).network(v).detach() for v in (v1, v2))
    q1, q2 = predictor(student(v1)), predictor(student(v2))
    ((2 - 2 * cosines(q1, z2)).mean() + (2 - 2 * cosines(q2, z1)).mean()).backward()
    method([v1, v2], None).loss.backward()
    for ours, plain in ((method.student, student), (method.predictor, predictor)):
        same_gradients(ours, plain)
    assert not any(p.requires_grad or p.grad is not None for p in method.teacher.parameters())


def test_a_step_moves_weights_by_m_and_statistics_by_alpha():
    """Momentum BN in student and predictor too: each norm moves once, by the mean of all that it saw."""
    method, k = byol(student_norm="momentum"), 4
    m, alpha = cosine(0.4, k, 10), cosine(0.8, k, 10)
    before, weights = state(method), dict(method.student.named_parameters())
    inputs: dict[MomentumBatchNorm, list[Tensor]] = {norm: [] for norm in norms(method)}
    for norm in inputs:
        norm.register_forward_hook(lambda norm, args, _: inputs[norm].append(args[0].detach()))
    method.before_step(k)
    assert all(norm.alpha == pytest.approx(alpha) for norm in inputs)
    for seed in (1, 2):  # two micro-batches
        method(views(seed=seed), None)
    method.after_step(k)
    after = state(method)
    for name, p in weights.items():
        expected = (1 - m) * before[f"teacher.network.{name}"] + m * p.detach()
        torch.testing.assert_close(after[f"teacher.network.{name}"], expected)
    assert {name.split(".")[0] for name, x in method.named_modules() if x in inputs} == {
        "student",
        "predictor",
        "teacher",
    }
    for name, norm in method.named_modules():
        if isinstance(norm, MomentumBatchNorm):
            assert len(inputs[norm]) == 4
            batches = [x.transpose(0, 1).flatten(1) for x in inputs[norm]]  # c × rest
            mean = torch.stack([x.mean(1) for x in batches]).mean(0)
            var = torch.stack([x.var(1, correction=0) for x in batches]).mean(0)
            for kind, batch in (("running_mean", mean), ("running_var", var)):
                expected = alpha * batch + (1 - alpha) * before[f"{name}.{kind}"]
                torch.testing.assert_close(after[f"{name}.{kind}"], expected, rtol=1e-4, atol=1e-5)
            assert norm.num_batches_tracked == before[f"{name}.num_batches_tracked"] + 1


def test_moco_loss_and_queue_over_several_steps():
    """A queue of 10 and 2 micro-batches of 4 images a step: the second step wraps around."""
    method = make("moco", queue_size=10, temperature=0.3)
    assert isinstance(method, MoCo)
    disturb(method.student, method.teacher)
    queue, pointer = method.queue.clone(), 0
    torch.testing.assert_close(queue.norm(dim=1), torch.ones(10))
    for k in range(3):
        method.before_step(k)
        student, teacher = copy.deepcopy(method.student), copy.deepcopy(method.teacher)
        new = []
        for i in range(2):
            v1, v2 = views(seed=10 * k + i)
            q, keys = unit(student(v1)), unit(teacher.network(v2))
            terms = []
            for row, key in zip(q, keys, strict=True):
                logits = torch.stack([row @ key, *(row @ old for old in queue)]) / 0.3
                terms.append(-(logits[0] - logits.logsumexp(0)))
            output = method([v1, v2], None)
            method.keep(output)
            torch.testing.assert_close(output.loss, torch.stack(terms).mean())
            torch.testing.assert_close(output.z, q.detach())
            assert torch.equal(method.queue, queue)  # only after the step
            new += list(keys)
        output.loss.backward()
        assert all(p.grad is None for p in method.teacher.parameters())
        assert all(p.grad is not None for p in method.student.parameters())
        method.after_step(k)
        for key in new:
            queue[pointer] = key.detach()
            pointer = (pointer + 1) % 10
        torch.testing.assert_close(method.queue, queue)
        queue = method.queue.clone()  # so that rounding does not add up
        assert method.pointer == pointer == (8 * (k + 1)) % 10
        assert method.keys == []


def test_moco_shuffles_by_the_step():
    """Two virtual devices: which images share statistics is drawn from the seed and the step alone."""

    def keys(k: int) -> Tensor:
        method = make("moco", devices=2, teacher_norm="shuffle", queue_size=16)
        method.before_step(k)
        return method(views(n=8), None).kept

    plain = make("moco", devices=2, teacher_norm="local", queue_size=16)
    plain.before_step(5)
    local = plain(views(n=8), None).kept
    assert torch.equal(keys(5), keys(5))
    assert not torch.allclose(keys(5), keys(6), atol=1e-3)
    assert not torch.allclose(keys(5), local, atol=1e-3)
    resumed = make("moco", devices=2, teacher_norm="shuffle", queue_size=16)
    for k in (4, 5):  # what was drawn before does not matter
        resumed.before_step(k)
        found = resumed(views(n=8), None).kept
    assert torch.equal(found, keys(5))


def test_simsiam_stops_the_gradient_through_the_whole_forward():
    """L = D(p1, stop(z2))/2 + D(p2, stop(z1))/2: z is a constant from a forward without gradient."""
    method, (v1, v2) = make("simsiam"), views()
    assert isinstance(method, SimSiam)
    disturb(method)
    f, h = copy.deepcopy(method.f), copy.deepcopy(method.h)
    with torch.no_grad():
        z1, z2 = copy.deepcopy(f)(v1), copy.deepcopy(f)(v2)
    terms = [-cosines(h(f(v1)), z2).mean() / 2, -cosines(h(f(v2)), z1).mean() / 2]
    output = method([v1, v2], None)
    torch.testing.assert_close(output.loss, sum(terms))
    assert abs(terms[0] - terms[1]) > 0.001
    sum(terms).backward()
    output.loss.backward()
    for ours, plain in ((method.f, f), (method.h, h)):
        same_gradients(ours, plain)


def test_simclr_finds_the_other_view_among_all_others():
    method, (v1, v2), t = make("simclr", temperature=0.4), views(), 0.4
    assert isinstance(method, SimCLR)
    disturb(method)
    student = copy.deepcopy(method.student)
    z = unit(torch.cat([student(v1), student(v2)]))
    terms = []
    for i in range(8):
        others = torch.stack([z[i] @ z[j] / t for j in range(8) if j != i])
        terms.append(others.logsumexp(0) - z[i] @ z[(i + 4) % 8] / t)
    expected = torch.stack(terms).mean()
    output = method([v1, v2], None)
    torch.testing.assert_close(output.loss, expected)
    expected.backward()
    output.loss.backward()
    same_gradients(method.student, student)


@pytest.mark.parametrize("frozen", [True, False])
def test_supervised_learns_with_and_without_its_encoder(frozen: bool):
    method = make("supervised", freeze_encoder=frozen)
    assert isinstance(method, Supervised)
    encoder, before, head = copy.deepcopy(method.encoder), state(method.encoder), state(method.head)
    assert method.head.training
    assert all(m.training is not frozen for m in method.encoder.modules())
    images, labels = views(n=6)[:1], torch.tensor([0, 1, 2, 0, 1, 2])
    plain = encoder.train(not frozen)(images[0])
    logits = copy.deepcopy(method.head)(plain)
    first = method(images, labels)
    torch.testing.assert_close(first.loss, -F.log_softmax(logits, 1)[torch.arange(6), labels].mean())
    torch.testing.assert_close(first.z, plain.detach())
    assert first.metrics["accuracy"] == (logits.argmax(1) == labels).float().mean()
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], 0.1)
    for k in range(8):
        method.before_step(k)
        output = method(images, labels)
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        method.after_step(k)
    assert output.loss < 0.7 * first.loss
    assert not same(state(method.head), head)
    assert same(state(method.encoder), before) is frozen
    assert all(p.grad is None for p in method.encoder.parameters()) is frozen
