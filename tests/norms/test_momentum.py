"""Momentum BN against the paper's formulas, written out in float64, and against torch's own batch norm."""

import copy
import io

import hypothesis.extra.numpy as hnp
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from momentum2 import MomentumBatchNorm
from momentum2.errors import UserError

C = 5
SHAPES = [(6, C), (6, C, 7), (6, C, 4, 3), (6, C, 2, 3, 4), (1, C, 4, 3), (2, C, 1, 1)]


def filled(norm, seed=0):
    """Any weight, bias and history, as after some training."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(C, generator=g) + 0.5)
        norm.bias.copy_(torch.randn(C, generator=g))
        norm.running_mean.copy_(torch.randn(C, generator=g))
        norm.running_var.copy_(torch.rand(C, generator=g) + 0.5)
        norm.num_batches_tracked.fill_(3)
        norm.set_histories(norm.running_mean[None], norm.running_var[None])
    return norm


def batch(shape, seed=1, channels_last=False):
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.7
    if not channels_last:
        return x
    return x.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])


def layouts():
    return [(s, cl) for s in SHAPES for cl in ((False, True) if len(s) > 3 else (False,))]


def batch_statistics(x):
    """(mean, biased variance, n) per channel in float64."""
    rows = x.double().transpose(0, 1).flatten(1)
    return rows.mean(1), ((rows - rows.mean(1, keepdim=True)) ** 2).mean(1), rows.shape[1]


@pytest.mark.parametrize(("shape", "channels_last"), layouts())
def test_alpha_one_is_training_mode_batch_norm(shape, channels_last):
    norm, x = filled(MomentumBatchNorm(C)), batch(shape, channels_last=channels_last)
    with torch.no_grad():
        y = norm(x)
        expected = F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
    assert (y - expected).abs().max() <= 1e-6
    assert y.stride() == x.stride()


@pytest.mark.parametrize(("shape", "channels_last"), layouts())
def test_alpha_zero_is_evaluation_mode_batch_norm(shape, channels_last):
    norm, x = filled(MomentumBatchNorm(C)), batch(shape, channels_last=channels_last)
    norm.alpha = 0.0
    with torch.no_grad():
        y = norm(x)
        expected = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    assert (y - expected).abs().max() <= 1e-6
    assert y.stride() == x.stride()


def test_one_sample_without_space_is_finite():
    """Its variance is 0: torch refuses it in training mode."""
    norm = filled(MomentumBatchNorm(C))
    for compat in ("paper", "official"):
        norm.compat = compat
        assert norm(batch((1, C))).isfinite().all()
    norm.commit()
    assert norm.running_mean.isfinite().all()
    assert norm.running_var.isfinite().all()


@pytest.mark.parametrize("compat", ["paper", "official"])
@pytest.mark.parametrize("grad", [False, True])
def test_output_is_the_formula(compat, grad):
    norm, x = filled(MomentumBatchNorm(C, compat=compat)), batch((6, C, 4, 3))
    norm.alpha = 0.3
    with torch.set_grad_enabled(grad):
        y = norm(x).double()
    mean, var, n = batch_statistics(x)
    if compat == "official":  # the authors': the unbiased variance, once more times n/(n−1)
        var = x.double().var(dim=(0, 2, 3), correction=1) * n / (n - 1)
    mean = 0.3 * mean + 0.7 * norm.running_mean.double()
    var = 0.3 * var + 0.7 * norm.running_var.double()
    scale = norm.weight.double() / (var + norm.eps).sqrt()
    expected = (x.double() - mean.view(-1, 1, 1)) * scale.view(-1, 1, 1) + norm.bias.double().view(-1, 1, 1)
    torch.testing.assert_close(y, expected, rtol=0, atol=2e-6)


def history_by_hand(steps, alphas, mean, var, fresh, compat="paper"):
    """PAPER.md's step 6 in float64. `steps`: for each optimizer step the batches between two commits."""
    mean, var = mean.double(), var.double()
    for batches, alpha in zip(steps, alphas, strict=True):
        means, variances, ns = zip(*map(batch_statistics, batches), strict=True)
        if compat == "official":
            variances = [v * (n / (n - 1)) ** 2 for v, n in zip(variances, ns, strict=True)]
        a = 1.0 if fresh else alpha
        fresh = False
        mean = a * sum(means) / len(means) + (1 - a) * mean
        var = a * sum(variances) / len(variances) + (1 - a) * var
    return mean, var


@pytest.mark.parametrize("compat", ["paper", "official"])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(
    "batches_a_step", [1, 2, 3, 8], ids=["moco", "two views", "three views", "4 micro × 2"]
)
def test_history_is_the_formula(batches_a_step, fresh, compat):
    norm = MomentumBatchNorm(C, compat=compat) if fresh else filled(MomentumBatchNorm(C, compat=compat))
    start = norm.running_mean.clone(), norm.running_var.clone()
    alphas = [0.9, 0.4, 0.064, 0.0, 0.5]
    steps = [
        [batch((4, C, 3, 3), seed=10 * k + i) for i in range(batches_a_step)] for k in range(len(alphas))
    ]
    for batches, alpha in zip(steps, alphas, strict=True):
        norm.alpha = alpha
        for x in batches:
            norm(x)
        norm.commit()
    mean, var = history_by_hand(steps, alphas, *start, fresh, compat)
    torch.testing.assert_close(norm.running_mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.running_var.double(), var, rtol=1e-6, atol=1e-6)
    assert norm.num_batches_tracked == len(alphas) + (0 if fresh else 3)


@pytest.mark.parametrize(("shape", "channels_last"), layouts())
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("alpha", [0.3, "auto"])
def test_without_a_gradient_the_bits_are_the_same(shape, channels_last, fresh, alpha):
    norms = [MomentumBatchNorm(C) if fresh else filled(MomentumBatchNorm(C)) for _ in range(2)]
    for norm, grad in zip(norms, (False, True), strict=True):
        norm.alpha = alpha
        outputs = []
        with torch.set_grad_enabled(grad):
            for seed in (1, 2, 3):
                outputs.append(norm(batch(shape, seed, channels_last)).detach())
                norm.commit()
        norm.seen = torch.stack(outputs)
    assert torch.equal(norms[0].seen, norms[1].seen)
    assert all(map(torch.equal, norms[0].histories(), norms[1].histories()))


def test_order_of_the_views_does_not_matter():
    one, other = filled(MomentumBatchNorm(C)), filled(MomentumBatchNorm(C))
    one.alpha = other.alpha = 0.4
    views = [batch((4, C, 3, 3), seed=i) for i in range(2)]
    outputs = [one(x) for x in views], [other(x) for x in reversed(views)]
    assert all(torch.equal(a, b) for a, b in zip(outputs[0], reversed(outputs[1]), strict=True))
    one.commit(), other.commit()
    assert torch.equal(one.running_mean, other.running_mean)
    assert torch.equal(one.running_var, other.running_var)


def test_history_is_frozen_until_the_commit():
    norm = filled(MomentumBatchNorm(C))
    before = {name: t.clone() for name, t in norm.state_dict().items()}
    norm(batch((4, C, 3, 3)))
    assert all(torch.equal(before[name], t) for name, t in norm.state_dict().items())


def test_a_commit_of_nothing_changes_nothing():
    norm = filled(MomentumBatchNorm(C))
    norm.alpha = 0.5
    norm(batch((4, C)))
    norm.commit()
    before = {name: t.clone() for name, t in norm.state_dict().items()}
    norm.commit()
    assert all(torch.equal(before[name], t) for name, t in norm.state_dict().items())


def test_evaluation_mode_is_plain_batch_norm_and_records_nothing():
    norm, x = filled(MomentumBatchNorm(C)).eval(), batch((4, C, 3, 3))
    expected = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    assert torch.equal(norm(x), expected)
    assert not any(statistics.any() for statistics in norm.pending())


def test_every_device_has_statistics_and_a_history_of_its_own():
    together, apart = (
        filled(MomentumBatchNorm(C, devices=3)),
        [filled(MomentumBatchNorm(C)) for _ in range(3)],
    )
    for seed in range(3):
        x, y = batch((12, C, 3, 3), seed=seed), batch((12, C, 3, 3), seed=10 + seed)
        for norm in (together, *apart):
            norm.alpha = 0.3
        with torch.no_grad():
            for view in (x, y):
                expected = torch.cat([norm(part) for norm, part in zip(apart, view.chunk(3), strict=True)])
                torch.testing.assert_close(together(view), expected, rtol=0, atol=2e-6)
        for norm in (together, *apart):
            norm.commit()
        means, variances = together.histories()
        torch.testing.assert_close(means, torch.stack([norm.running_mean for norm in apart]))
        torch.testing.assert_close(variances, torch.stack([norm.running_var for norm in apart]))
    assert torch.equal(together.running_mean, means[0])  # plain keys: the first device's


def test_a_state_dict_gives_its_history_to_every_device_and_rows_come_back():
    norm = MomentumBatchNorm(C, devices=3)
    plain = filled(MomentumBatchNorm(C))
    norm.load_state_dict(plain.state_dict())
    assert torch.equal(norm.histories()[0], plain.running_mean.expand(3, C))
    rows = torch.arange(3.0 * C).view(3, C), torch.ones(3, C)
    norm.set_histories(*rows)
    assert all(torch.equal(a, b) for a, b in zip(norm.histories(), rows, strict=True))
    assert torch.equal(copy.deepcopy(norm).double().histories()[0], rows[0].double())


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_flow_through_the_blended_statistics(devices, affine):
    """For a student with Momentum BN."""
    norm = MomentumBatchNorm(3, affine=affine, devices=devices).double()
    norm.alpha = 0.4
    x = torch.randn(4, 3, 2, 2, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, *norm.parameters()))


def test_state_dict_is_plain_batch_norms_both_ways():
    norm, plain = filled(MomentumBatchNorm(C)), nn.BatchNorm2d(C)
    norm(batch((4, C)))
    assert list(norm.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(norm.state_dict(), strict=True)
    fresh = MomentumBatchNorm(C)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(fresh.running_var, norm.running_var)
    x = batch((4, C, 3, 3))
    assert torch.equal(plain.eval()(x), fresh.eval()(x))


def test_a_resumed_norm_goes_on_as_if_never_stopped():
    norm, file = MomentumBatchNorm(C), io.BytesIO()
    norm.alpha = 0.2
    norm(batch((4, C), seed=1))
    norm.commit()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    resumed = MomentumBatchNorm(C)
    resumed.load_state_dict(torch.load(file))
    resumed.alpha = 0.2
    for n in (norm, resumed):
        n(batch((4, C), seed=2))
        n.commit()
    assert torch.equal(norm.running_mean, resumed.running_mean)
    assert torch.equal(norm.running_var, resumed.running_var)


def test_deepcopy_is_independent():
    norm = filled(MomentumBatchNorm(C))
    norm.alpha = 0.25
    other = copy.deepcopy(norm)
    assert other.alpha == 0.25
    norm(batch((4, C)))
    norm.alpha = 1.0
    assert not any(statistics.any() for statistics in other.pending())
    assert other.alpha == 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
def test_autocast_takes_statistics_in_fp32(dtype, grad):
    norm, x = filled(MomentumBatchNorm(C)), batch((16, C, 9, 9)).to(dtype)
    with torch.autocast("cpu", dtype=dtype), torch.set_grad_enabled(grad):
        y = norm(x)
    assert y.dtype == dtype
    mean, var, _ = batch_statistics(x)
    pending_mean, pending_var = norm.pending()
    torch.testing.assert_close(pending_mean[0].double(), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pending_var[0].double(), var, rtol=1e-5, atol=1e-6)
    expected = F.batch_norm(x.float(), None, None, norm.weight, norm.bias, training=True)
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=2e-2)


def test_inference_mode():
    norm, x = filled(MomentumBatchNorm(C)), batch((4, C, 3, 3))
    other = copy.deepcopy(norm)
    with torch.inference_mode():
        norm(x)
    other(x)
    norm.commit(), other.commit()
    assert torch.equal(norm.running_mean, other.running_mean)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_compiles_whole_and_once(devices):
    norm, twin = filled(MomentumBatchNorm(C, devices=devices)), filled(MomentumBatchNorm(C, devices=devices))
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="inductor" if devices == 1 else "aot_eager")
    x = batch((4, C, 3, 3))
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for alpha in (1.0, 0.5, 0.25, 0.0):
            norm.alpha = twin.alpha = alpha
            for _ in range(2):
                torch.testing.assert_close(compiled(x), twin(x), rtol=0, atol=2e-6)
            norm.commit(), twin.commit()
    torch.testing.assert_close(norm.running_mean, twin.running_mean)
    torch.testing.assert_close(norm.running_var, twin.running_var)


def test_mistakes_are_said_clearly():
    norm = MomentumBatchNorm(C, devices=4)
    with pytest.raises(UserError, match="6 samples cannot be divided among 4 devices"):
        norm(batch((6, C)))
    with pytest.raises(UserError, match=r"between 0 and 1, or auto, not 1\.5"):
        norm.alpha = 1.5
    with pytest.raises(ValueError, match="2 to 5 dimensions"):
        norm(torch.zeros(C))


@settings(max_examples=150)
@given(
    shape=hnp.array_shapes(min_dims=1, max_dims=4, max_side=4),
    channels=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    alpha=st.floats(0, 1),
    exponent=st.floats(-20, 20),
    offset=st.sampled_from([0.0, 1.0, -1e3, 1e20]),
    constant=st.booleans(),
    grad=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_finite_where_torch_is_finite(shape, channels, dtype, alpha, exponent, offset, constant, grad, seed):
    shape = (shape[0], channels, *shape[1:])
    x = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * 10.0**exponent
    )
    x = (x * (not constant) + offset).to(dtype)
    norm = MomentumBatchNorm(channels).to(torch.float64 if dtype == torch.float64 else torch.float32)
    norm.alpha = alpha
    torchs = [F.batch_norm(x, norm.running_mean, norm.running_var)]
    if x.numel() > channels:  # else torch refuses
        torchs.append(F.batch_norm(x, None, None, training=True))
    if not all(y.isfinite().all() for y in torchs):
        return
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            y = norm(x), norm(x)
        assert y[0].shape == x.shape
        assert y[0].dtype == dtype
        assert y[0].isfinite().all()
        assert torch.equal(y[0], y[1])
        norm.commit()
        assert norm.running_mean.isfinite().all()
        assert norm.running_var.isfinite().all()
