"""Ten steps of every method, as the package builds it, on four devices in one process, against the oracle in fp64."""

import pytest
import torch
from cases import Case
from oracle import Oracle, norms
from torch import Tensor

from momentum2.methods import Method
from momentum2.training.build import build_method
from momentum2.training.plan import resolve

CASES = [
    # The six pairs of Table 1, and alpha in all its ways.
    *(Case("byol", student, teacher) for student in ("local", "synced") for teacher in ("local", "synced")),
    *(Case("byol", "local", alpha=a, accumulate=n) for a in (None, 1.0, 0.5, 0.064, 0.01) for n in (1, 2)),
    *(Case("byol", "synced", accumulate=n) for n in (1, 2)),
    Case("byol", "local", alpha_base=0.5),
    Case("byol", "local", alpha=0.5, history="global", accumulate=2),
    Case("byol", "local", "ema"),
    Case("moco", "local", "shuffle", accumulate=2),
    Case("moco", "local", alpha=0.064, accumulate=2),
    Case("moco", "local", "ema", accumulate=2),
    *(Case("simclr", student) for student in ("local", "synced")),
    *(Case("simsiam", student) for student in ("local", "synced")),
]


def views(n: int, seed: int) -> list[Tensor]:
    """Two views of n images that differ in brightness and contrast, so that the devices do, (n, 3, 16, 16) each."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(2):
        light, contrast = torch.randn(2, n, 3, 1, 1, generator=generator, dtype=torch.float64)
        pixels = torch.randn(n, 3, 16, 16, generator=generator, dtype=torch.float64)
        made.append(light + (0.5 * contrast).exp() * pixels)
    return made


def close(ours: Tensor, right: Tensor, what: str) -> None:
    assert ours.shape == right.shape, what
    error, scale = (ours - right).abs().max(), right.abs().max()
    assert error <= 1e-9 * scale, f"{what}: off by {error / scale:.1e}"


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps_are_the_oracles(case: Case):
    config, settings = case.config(), case.settings()
    method = build_method(config, resolve(config, 5 * case.batch, 1), 0).double().train()
    oracle = Oracle(method, settings)
    trained = {name: p for name, p in method.named_parameters() if p.requires_grad}
    scheduled, constant = (
        {"params": [p for name, p in trained.items() if name.startswith("h.") == is_predictor]}
        for is_predictor in (False, True)  # SimSiam's
    )
    optimizer = torch.optim.SGD([scheduled, constant], lr=settings.lr(0), momentum=0.9, weight_decay=1e-4)
    rows = case.batch // case.accumulate
    for k in range(case.steps):
        batch = views(case.batch, seed=k)
        right = oracle.step(batch)
        method.before_step(k)
        loss = 0.0
        for i in range(case.accumulate):
            output = method([v[i * rows : (i + 1) * rows] for v in batch], None)
            method.keep(output)
            part = output.loss / case.accumulate
            part.backward()
            loss += part.item()
        optimizer.param_groups[0]["lr"] = settings.lr(k)
        optimizer.step()
        optimizer.zero_grad()
        method.after_step(k)
        assert loss == pytest.approx(right, rel=1e-9, abs=1e-9), f"step {k}"
    compare(method, oracle)


def compare(method: Method, oracle: Oracle) -> None:
    """Weights, plain keys, each device's history, and MoCo's queue."""
    networks = {prefix: (method.get_submodule(prefix), right) for prefix, right in oracle.trained.items()}
    if hasattr(oracle, "teacher"):
        networks["teacher"] = method.get_submodule("teacher.network"), oracle.teacher
    for prefix, (ours, right) in networks.items():
        parameters, expected = dict(ours.named_parameters()), dict(right.named_parameters())
        assert parameters.keys() == expected.keys()
        for name, p in expected.items():
            close(parameters[name], p, f"{prefix}.{name}")
        for name, norm in norms(right).items():
            where = f"{prefix}.{name}"
            close(ours.get_buffer(f"{name}.running_mean"), norm.means[0], f"{where}, mean")
            close(ours.get_buffer(f"{name}.running_var"), norm.vars[0], f"{where}, variance")
            if norm.kind == "momentum":
                means, variances = ours.get_submodule(name).histories()
                close(means, norm.means, f"{where}, the histories' means")
                close(variances, norm.vars, f"{where}, the histories' variances")
    if hasattr(oracle, "queue"):
        close(method.get_buffer("queue"), oracle.queue, "queue")


def test_the_oracle_tells_devices_apart():
    """Else the tests above could not fail: every device's history is its own, and the teacher is no student."""
    case = Case("byol", "local", alpha=0.5)
    config = case.config()
    method = build_method(config, resolve(config, 5 * case.batch, 1), 0).double().train()
    oracle = Oracle(method, case.settings())
    losses = [oracle.step(views(case.batch, seed=k)) for k in range(case.steps)]
    assert losses[-1] < losses[0] - 0.5  # it learns
    for norm in norms(oracle.teacher).values():
        apart = (norm.means - norm.means.mean(0)).abs().mean(1)
        assert (apart > 1e-3 * norm.vars.mean().sqrt()).all()
    theirs = dict(oracle.student.named_parameters())
    assert not [name for name, p in oracle.teacher.named_parameters() if torch.allclose(p, theirs[name])]
