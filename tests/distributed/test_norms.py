"""Norms, teacher and collectives over 2 and 4 real processes, against one process with the whole batch."""

import pytest
import torch
from torch import nn

from momentum2 import MomentumTeacher, distributed

SEVERAL = [pytest.param(n, id=f"{n} processes", marks=pytest.mark.slow) for n in (2, 4)]


@pytest.fixture(scope="module", params=SEVERAL)
def results(request, on_processes):
    """The results of every process, in the order of their ranks."""
    return on_processes("norms_program.py", request.param)


def data(shape, seed):
    """The program's data, drawn again."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def network():
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5)
    )


def everyone(results, job, name):
    return [r[job][name] for r in results]


def identical(tensors):
    return all(torch.equal(tensors[0], t) for t in tensors)


def test_ranks(results):
    world = len(results)
    assert [w.tolist() for w in everyone(results, "collectives", "who")] == [
        [r, world, r == 0] for r in range(world)
    ]


def test_gather_and_its_gradient(results):
    world = len(results)
    x = torch.cat([data((2, 3), r) for r in range(world)])
    assert all(torch.equal(g, x) for g in everyone(results, "collectives", "gathered"))
    # Σ over the ranks' losses, (rank + 1) · x², of which each rank holds its own part.
    expected = sum(range(1, world + 1)) * 2 * x
    torch.testing.assert_close(torch.cat(everyone(results, "collectives", "gather_grad")), expected)


def test_gather_of_uneven_parts(results):
    world = len(results)
    x = torch.cat([data((r + 1, 3), r) for r in range(world)])
    assert all(torch.equal(g, x) for g in everyone(results, "collectives", "uneven"))
    expected = sum(range(1, world + 1)) * 2 * x
    torch.testing.assert_close(torch.cat(everyone(results, "collectives", "uneven_grad")), expected)


def test_gradient_of_all_reduce(results):
    world = len(results)
    total = sum(data((2, 3), r) for r in range(world))
    for grad in everyone(results, "collectives", "all_reduce_grad"):
        torch.testing.assert_close(grad, sum(range(1, world + 1)) * 2 * total)


def test_mean_of_many_tensors(results):
    world = len(results)
    for name, shape in (("mean0", (3,)), ("mean1", ()), ("mean2", (2, 2))):
        means = everyone(results, "collectives", name)
        assert identical(means)
        torch.testing.assert_close(means[0], sum(data(shape, r) for r in range(world)) / world)


@pytest.mark.parametrize("job", ["synced", "synced_channels_last", "synced_uneven"])
def test_synced_norm_is_one_process_with_the_whole_batch(results, job):
    whole = nn.BatchNorm2d(4)
    with torch.no_grad():
        whole.weight.copy_(data((4,), 1))
        whole.bias.copy_(data((4,), 2))
    for step in range(2):
        x = data((12, 4, 3, 3), 10 + step).requires_grad_()
        y = whole(x)
        y.backward(data((12, 4, 3, 3), 20 + step))
    torch.testing.assert_close(torch.cat(everyone(results, job, "y")), y.detach(), rtol=0, atol=2e-6)
    torch.testing.assert_close(torch.cat(everyone(results, job, "dx")), x.grad, rtol=1e-5, atol=2e-6)
    for name, parameter in whole.named_parameters():  # each process has its own samples' share
        total = sum(everyone(results, job, f"d{name}"))
        torch.testing.assert_close(total, parameter.grad, rtol=1e-5, atol=1e-4)
    for name, buffer in whole.named_buffers():
        assert identical(everyone(results, job, name))
        torch.testing.assert_close(results[0][job][name], buffer, rtol=1e-6, atol=1e-6)


def test_synced_network_has_the_gradients_of_one_process(results):
    net = network()
    net(data((12, 3, 5, 5), 5)).square().mean().backward()
    for name, parameter in net.named_parameters():
        tensors = everyone(results, "synced_network", name)
        assert identical(tensors)
        torch.testing.assert_close(tensors[0], parameter.grad, rtol=1e-4, atol=1e-5)


def test_shuffle_returns_every_sample_to_its_place(results):
    torch.testing.assert_close(torch.cat(everyone(results, "shuffle", "kept")), 2 * data((12, 3), 3))


def test_shuffle_mixes_the_processes(results):
    x, seen = data((12, 3), 3), everyone(results, "shuffle", "seen")
    order = torch.randperm(12, generator=torch.Generator().manual_seed(11))
    assert torch.equal(torch.cat(seen), x[order])
    for rank, part in enumerate(x.chunk(len(results))):
        own = sum(any(torch.equal(sample, own) for own in part) for sample in seen[rank])
        assert own < len(part)


def test_local_history_is_each_processes_own(results):
    means = everyone(results, "teachers", "local.1.running_mean")
    assert not any(torch.equal(means[0], other) for other in means[1:])
    # Weights stand still, so the first norm's statistics can be had from the first layer alone.
    net = network()
    for rank, mean in enumerate(means):
        expected = None
        for step in range(3):
            views = [data((12, 3, 5, 5), 40 + 2 * step + v).chunk(len(results))[rank] for v in range(2)]
            batch = sum(net[0](view).mean((0, 2, 3)) for view in views).detach() / 2
            expected = batch if expected is None else 0.5 * batch + 0.5 * expected
        torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-6)


def test_global_history_is_identical_and_the_mean_of_the_local_ones(results):
    names = [n for n in results[0]["teachers"] if n.startswith("global.")]
    assert any("running_var" in name for name in names)
    for name in names:
        assert identical(everyone(results, "teachers", name)), name
    first = torch.stack(everyone(results, "teachers", "first_local_mean")).mean(0)
    torch.testing.assert_close(results[0]["teachers"]["first_global_mean"], first, rtol=1e-6, atol=1e-6)
    # The first norm's input does not depend on any history, so it stays the mean in every step after it.
    for statistic in ("running_mean", "running_var"):
        local = torch.stack(everyone(results, "teachers", f"local.1.{statistic}")).mean(0)
        torch.testing.assert_close(
            results[0]["teachers"][f"global.1.{statistic}"], local, rtol=1e-6, atol=1e-6
        )


def test_all_devices_choose_the_same_alpha_where_the_history_is_global(results):
    for name in results[0]["choosing"]:
        assert identical(everyone(results, "choosing", name)), name
    alphas = results[0]["choosing"]["alphas"]  # steps, devices of a process, norms
    assert torch.equal(alphas[:, 0], alphas[:, 1])
    assert not torch.equal(alphas[:, 0, 0], alphas[:, 0, 1])
    # One process with as many devices sees the same, up to the order of its sums.
    net = network()
    one = MomentumTeacher(net, history="global", devices=2 * len(results))
    for step in range(30):
        one(data((16, 3, 5, 5), 70 + step))
        one.update(net, weight=0.0, statistics="auto")
        torch.testing.assert_close(one.alphas(), alphas[step, 0], rtol=1e-4, atol=1e-6)


def test_a_single_process_needs_no_collective():
    x = torch.ones(2, requires_grad=True)
    distributed.setup(torch.device("cpu"))
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    assert distributed.gather(x) is x
    assert distributed.all_reduce_sum(x) is x
    distributed.all_reduce_mean_([x])
    distributed.barrier()
    distributed.teardown()
    assert x.tolist() == [1, 1]
