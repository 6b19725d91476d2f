"""Norms that choose their own alpha, on statistics whose best alpha is known in closed form.

The statistics of all data walk by a variance Q a step, of which a batch sees a sample with a variance R. The gain of
the Kalman filter of that solves alpha² / (1 − alpha) = Q / R.
"""

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from momentum2 import MomentumBatchNorm
from momentum2.errors import UserError
from momentum2.norms.momentum import SLOWEST, commit_all

C = 64
NOISE = 0.002  # √R, small beside the variance of 1
Steps = Iterator[tuple[Tensor, Tensor]]


def batch(statistics: Tensor) -> Tensor:
    """Two samples for each device that have exactly these means, and variances of 1 more than the second row.

    The noise of a variance is √2 times that of a mean.
    """
    mean, std = statistics[0], (1 + 2**0.5 * statistics[1]).sqrt()
    return torch.stack((mean - std, mean + std), -2).flatten(0, -2)


def walk(
    q: Callable[[int], float], steps: int, noise: float = NOISE, devices: int = 1, seed: int = 0
) -> Steps:
    """True statistics (2, c) that walk by q(n)·R, and what each device sees of them, (2, devices, c)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.zeros(2, C, dtype=torch.float64)
    for n in range(steps):
        x = x + NOISE * math.sqrt(q(n)) * torch.randn(2, C, generator=g, dtype=torch.float64)
        yield x, x[:, None] + noise * torch.randn(2, devices, C, generator=g, dtype=torch.float64)


def auto(devices: int = 1) -> MomentumBatchNorm:
    norm = MomentumBatchNorm(C, eps=0.0, affine=False, devices=devices).double()
    norm.alpha = "auto"
    return norm


def follow(norm: MomentumBatchNorm, steps: Steps) -> tuple[Tensor, Tensor]:
    """The alpha of each step, and the mean squared error of the mean's history after it."""
    alphas, errors = [], []
    for x, seen in steps:
        alphas.append(norm.alphas().mean())
        norm(batch(seen))
        norm.commit()
        errors.append((norm.running_mean - x[0]).square().mean())
    return torch.stack(alphas), torch.stack(errors)


def best(q: float) -> float:
    return (math.sqrt(q * q + 4 * q) - q) / 2


@pytest.mark.parametrize("q", [1, 0.1, 0.01])
def test_a_walk_is_followed_by_the_gain_of_its_kalman_filter(q: float):
    alphas, errors = follow(auto(), walk(lambda n: q, 1200))
    assert alphas[500:].mean() == pytest.approx(best(q), rel=0.1)
    # The filter's own error is alpha · R.
    assert errors[500:].mean() == pytest.approx(best(q) * NOISE**2, rel=0.1)


def measured(alpha: float, halves: bool = False) -> tuple[float, float]:
    """1 − R/S with R from what differs between the parts of a batch, and alpha + the norm's own correlation.

    The parts are four devices with independent samples; or the halves of a batch that was normalized as a whole.
    """
    norm = auto(1 if halves else 4)
    g = torch.Generator().manual_seed(1)
    within, innovations, correlations = [], [], []
    for n, (x, seen) in enumerate(walk(lambda n: 0.1, 1000, devices=norm.devices)):
        norm.auto_state()["alpha"].fill_(alpha)
        if halves:
            noise = F.batch_norm(
                torch.randn(16, C, generator=g, dtype=torch.float64), None, None, training=True
            )
            samples = noise + (seen if n % 2 else x[:, None])[0]
            parts = torch.stack([part.mean(0) for part in samples.chunk(2)])
        else:
            samples, parts = batch(seen), seen[0]
        norm(samples)
        innovations.append((norm.pending()[0] - norm.histories()[0]).square().mean())
        # Of the mean of the halves, which is what is committed; of each device.
        within.append(parts.var(0).mean() / (2 if halves else 1))
        norm.commit()
        correlations.append(norm.auto_state()["correlation"].mean())
    r, s, rho = (torch.stack(values[300:]).mean().item() for values in (within, innovations, correlations))
    return 1 - r / s, alpha + rho


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.8])
def test_the_correlation_is_what_independent_devices_say(alpha: float):
    by_noise, by_correlation = measured(alpha)
    assert by_correlation == pytest.approx(by_noise, abs=0.02)


def test_halves_of_one_normalized_batch_say_nothing():
    """What was normalized upstream has the mean 0 as a whole; the difference of its halves is no noise of it."""
    by_noise, by_correlation = measured(0.3, halves=True)
    assert 0 < by_correlation < 1
    assert by_noise < by_correlation - 1


def test_without_drift_alpha_falls_to_the_floor():
    """The correlation is then −alpha / 2, so alpha moves by −alpha² / 20, and 1 / alpha by 1 / 20; later by more, as
    what is remembered of the correlation is of a larger alpha."""
    alphas, errors = follow(auto(), walk(lambda n: 0, 1500))
    assert alphas[:2].tolist() == [1, 0.5]
    n = torch.arange(1, 1501)
    assert (alphas >= 1 / n - 1e-9).all()
    assert alphas[100] == pytest.approx(1 / (2 + 100 / 20), rel=0.25)
    assert SLOWEST <= alphas[500] < 1 / (2 + 500 / 20)
    assert SLOWEST <= alphas[-1] < 0.025
    assert errors[-300:].mean() < 0.02 * NOISE**2  # that of a filter with alpha is alpha / 2


def test_without_noise_the_history_is_the_batch():
    norm = auto()
    alphas, errors = follow(norm, walk(lambda n: 1, 600, noise=0.0))
    assert alphas[200:].mean() > 0.95
    assert errors[200:].mean() < 0.01 * NOISE**2


@pytest.mark.parametrize("speed", [0.1, 0.03])
def test_a_straight_drift(speed: float):
    """The innovations are uncorrelated where the square of the lag, (d/alpha)², is what the filter's noise is."""
    steps = (
        (x + n * speed * NOISE, seen + n * speed * NOISE)
        for n, (x, seen) in enumerate(walk(lambda n: 0, 1000))
    )
    alphas, _ = follow(auto(), steps)
    assert alphas[500:].mean() == pytest.approx((2 * speed**2) ** (1 / 3), rel=0.25)


def test_a_drift_that_stops_and_one_that_begins():
    norm = auto()
    alphas, _ = follow(norm, walk(lambda n: 0.1 if n < 500 or n >= 1500 else 0, 1900))
    assert alphas[300:500].mean() == pytest.approx(best(0.1), rel=0.2)
    assert alphas[1000] < 0.05
    assert alphas[1499] < 0.03
    assert alphas[1700:].mean() == pytest.approx(best(0.1), rel=0.2)


@pytest.mark.parametrize("bad", [1e6, 1e300, math.inf, math.nan])
def test_a_bad_batch_is_over_soon(bad: float):
    """Alpha rises as far as it takes to leave it behind."""
    norm, alphas = auto(), []
    for n, (x, seen) in enumerate(walk(lambda n: 0.1, 500)):
        norm(batch(seen) * bad if n == 300 else batch(seen))
        norm.commit()
        alphas.append(norm.alpha)
        for tensor in (norm.running_mean, norm.running_var, *norm.auto_state().values()):
            assert tensor.isfinite().all()
        if n == 350:
            assert (norm.running_mean - x[0]).square().mean() < 4 * best(0.1) * NOISE**2
    assert torch.tensor(alphas[400:]).mean() == pytest.approx(best(0.1), rel=0.5)


def test_devices_in_one_norm_are_norms_of_their_own():
    """So it does not matter how many of them a process has."""
    together, alone = auto(4), [auto() for _ in range(4)]
    for _, seen in walk(lambda n: 0.1, 100, devices=4):
        together(batch(seen))
        together.commit()
        for d, norm in enumerate(alone):
            norm(batch(seen[:, d : d + 1]))
        commit_all(alone)
    for name, rows in together.auto_state().items():
        torch.testing.assert_close(rows, torch.cat([norm.auto_state()[name] for norm in alone]))
    torch.testing.assert_close(together.histories()[0], torch.cat([norm.histories()[0] for norm in alone]))
    assert together._alpha.unique().numel() == 4


def test_a_commit_of_nothing_changes_nothing():
    norm = auto()
    follow(norm, walk(lambda n: 0.1, 50))
    before = copy.deepcopy(norm)
    norm.commit()
    for name, rows in before.auto_state().items():
        assert torch.equal(norm.auto_state()[name], rows), name
    assert torch.equal(norm.running_mean, before.running_mean)
    assert norm.alpha == before.alpha


def test_what_is_learned_is_a_state_of_its_own():
    norm, other = auto(), MomentumBatchNorm(C, eps=0.0, affine=False).double()
    steps = walk(lambda n: 0.1, 60)
    follow(norm, (next(steps) for _ in range(30)))
    assert norm.state_dict().keys() == other.state_dict().keys()  # those of plain batch norm
    other.load_state_dict(norm.state_dict())
    assert other.auto_state() == {}
    other.set_auto_state(norm.auto_state())
    rest = list(steps)
    assert torch.equal(follow(norm, iter(rest))[0], follow(other, iter(rest))[0])
    norm.alpha = 0.25
    assert norm.alpha == 0.25
    assert norm.auto_state() == {}
    with pytest.raises(UserError, match="or auto, not Auto"):
        norm.alpha = "Auto"
    norm(batch(rest[0][1]))
    norm.commit()
