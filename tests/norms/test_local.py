"""Split BN against k separate replicas of torch's own batch norm."""

import pytest
import torch
from torch import nn

from momentum2 import LocalBatchNorm, SyncedBatchNorm
from momentum2.errors import UserError

C = 5
TORCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
LAYOUTS = [
    ((12, C), torch.contiguous_format),
    ((12, C, 7), torch.contiguous_format),
    ((12, C, 4, 3), torch.contiguous_format),
    ((12, C, 4, 3), torch.channels_last),
    ((12, C, 2, 3, 2), torch.channels_last_3d),
]


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 0.5


def pair(make, dim, **options):
    """Our norm, and torch's with the same weight and bias."""
    ours, theirs = make(C, **options), TORCH[dim](C, momentum=options.get("statistics_momentum", 0.1))
    with torch.no_grad():
        ours.weight.copy_(random(C, 100))
        ours.bias.copy_(random(C, 101))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


@pytest.mark.parametrize(("shape", "memory_format"), LAYOUTS)
@pytest.mark.parametrize("devices", [1, 3, 4])
def test_equals_separate_replicas(shape, memory_format, devices):
    split, first = pair(LocalBatchNorm, len(shape), devices=devices)
    replicas = [first, *(pair(LocalBatchNorm, len(shape))[1] for _ in range(devices - 1))]
    for step in range(2):
        x = random(shape, step).contiguous(memory_format=memory_format).requires_grad_()
        x2 = x.detach().clone().requires_grad_()
        y = split(x)
        y2 = torch.cat([r(part) for r, part in zip(replicas, x2.chunk(devices), strict=True)])
        torch.testing.assert_close(y, y2, rtol=0, atol=3e-6)
        assert y.stride() == x.stride()
        g = random(shape, 50 + step)
        y.backward(g)
        y2.backward(g)
        torch.testing.assert_close(x.grad, x2.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(split.weight.grad, sum(r.weight.grad for r in replicas), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(split.bias.grad, sum(r.bias.grad for r in replicas), rtol=1e-4, atol=1e-4)
    for name, buffer in replicas[0].named_buffers():  # the running statistics of replica 0
        torch.testing.assert_close(split.get_buffer(name), buffer, rtol=1e-5, atol=1e-6)
    x = random(shape, 9)
    torch.testing.assert_close(split.eval()(x), replicas[0].eval()(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_may_write_into_the_output(dtype):
    """As ReLU(inplace=True) does in every ResNet."""
    norm, _ = pair(LocalBatchNorm, 4, devices=3)
    x, x2 = (random((12, C, 3, 3), 0).to(dtype).requires_grad_() for _ in range(2))
    nn.functional.relu(norm(x), inplace=True).sum().backward()
    nn.functional.relu(norm(x2)).sum().backward()
    assert torch.equal(x.grad, x2.grad)


def test_gradients_by_finite_differences():
    norm = LocalBatchNorm(2, devices=2).double()
    x = torch.randn(4, 2, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, *norm.parameters()))


def test_gradients_of_a_large_mean_are_accurate():
    """Sums of squares would lose every digit here; the centered sums must not."""
    norm, _ = pair(LocalBatchNorm, 4, devices=4)
    x = (random((8, C, 6, 6), 0) + 1000).requires_grad_()
    twin, x2 = LocalBatchNorm(C, devices=4).double(), x.detach().double().requires_grad_()
    twin.load_state_dict(norm.state_dict())
    g = random(x.shape, 1)
    y, y2 = norm(x), twin(x2)
    y.backward(g)
    y2.backward(g.double())
    torch.testing.assert_close(y.double(), y2, rtol=0, atol=2e-3)
    torch.testing.assert_close(x.grad.double(), x2.grad, rtol=0, atol=2e-3)


def test_cumulative_running_statistics():
    """torch's momentum=None: the plain mean over all batches."""
    split, plain = pair(LocalBatchNorm, 2, devices=2, statistics_momentum=None)
    for step in range(3):
        x = random((8, C), step)
        split(x)
        plain(x[:4])
    torch.testing.assert_close(split.running_mean, plain.running_mean)
    torch.testing.assert_close(split.running_var, plain.running_var)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_fp32_statistics(dtype):
    split, plain = pair(LocalBatchNorm, 4, devices=3)
    x = random((12, C, 9, 9), 0).to(dtype).requires_grad_()
    x2 = x.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        y = split(x)
    y2 = torch.cat(
        [nn.functional.batch_norm(p, None, None, plain.weight, plain.bias, True) for p in x2.chunk(3)]
    )
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), y2, rtol=1e-2, atol=2e-2)
    assert split.running_mean.dtype == torch.float32
    g = random(y.shape, 1).to(dtype)
    y.backward(g)
    y2.backward(g.float())
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.float(), x2.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_compiles_with_gradients():
    torch._dynamo.reset()
    norm, twin = (pair(LocalBatchNorm, 4, devices=3)[0] for _ in range(2))
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = random((12, C, 3, 3), 0).requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    y, y2 = compiled(x), twin(x2)
    torch.testing.assert_close(y, y2, rtol=0, atol=3e-6)
    y.square().sum().backward()
    y2.square().sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.running_var, twin.running_var)


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="10 samples cannot be divided among 4 devices"):
        LocalBatchNorm(C, devices=4)(random((10, C), 0))


def test_synced_in_a_single_process_is_plain_batch_norm():
    synced, plain = pair(SyncedBatchNorm, 4)
    x = random((6, C, 3, 3), 0)
    assert torch.equal(synced(x), plain(x))
    assert torch.equal(synced.running_var, plain.running_var)
    assert torch.equal(synced.eval()(x), plain.eval()(x))
