"""What every process of tests/distributed/test_norms.py runs: `python norms_program.py RESULTS_DIRECTORY`.

It finds the other processes by torchrun's environment and saves what it computed; the test judges.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from momentum2 import MomentumTeacher, SyncedBatchNorm, convert_norms, distributed, shuffled


def data(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.BatchNorm1d(5)
    )


def maybe_ddp(net: nn.Module) -> nn.Module:
    """Inside DistributedDataParallel where there are two processes; its import costs each one seconds."""
    return DistributedDataParallel(net, broadcast_buffers=False) if distributed.world_size() == 2 else net


def part(x: Tensor, uneven: bool = False) -> Tensor:
    """This process's samples of the global batch; uneven: the first process has only one."""
    world, rank = distributed.world_size(), distributed.rank()
    if not uneven:
        return x.chunk(world)[rank]
    rest = (len(x) - 1) // (world - 1)
    return x.split([1] + [rest] * (world - 2) + [len(x) - 1 - rest * (world - 2)])[rank]


def collectives() -> dict[str, Tensor]:
    rank = distributed.rank()
    x = (data((2, 3), rank)).requires_grad_()
    (distributed.all_reduce_sum(x).square() * (rank + 1)).sum().backward()
    y = (data((2, 3), rank)).requires_grad_()
    gathered = distributed.gather(y)
    (gathered.square() * (rank + 1)).sum().backward()
    z = (data((rank + 1, 3), rank)).requires_grad_()
    uneven = distributed.gather(z, even=False)
    (uneven.square() * (rank + 1)).sum().backward()
    means = [data((3,), rank), data((), rank), data((2, 2), rank)]
    distributed.all_reduce_mean_(means)
    distributed.barrier()
    return {
        "all_reduce_grad": x.grad,
        "gathered": gathered,
        "gather_grad": y.grad,
        "uneven": uneven,
        "uneven_grad": z.grad,
        "mean0": means[0],
        "mean1": means[1],
        "mean2": means[2],
        "who": torch.tensor([rank, distributed.world_size(), distributed.is_main()]),
    }


def synced(uneven: bool, channels_last: bool) -> dict[str, Tensor]:
    norm = SyncedBatchNorm(4)
    with torch.no_grad():
        norm.weight.copy_(data((4,), 1))
        norm.bias.copy_(data((4,), 2))
    for step in range(2):
        x = part(data((12, 4, 3, 3), 10 + step), uneven)
        x = x.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        x.requires_grad_()
        y = norm(x)
        y.backward(part(data((12, 4, 3, 3), 20 + step), uneven))
    assert y.stride() == x.stride()
    return {
        "y": y,
        "dx": x.grad,
        "dweight": norm.weight.grad,
        "dbias": norm.bias.grad,
        **dict(norm.named_buffers()),
    }


def synced_network() -> dict[str, Tensor]:
    """Gradients of a whole network, as the mean over the processes."""
    net = network()
    convert_norms(net, "synced")
    model = maybe_ddp(net)
    model(part(data((12, 3, 5, 5), 5))).square().mean().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    if model is net:
        distributed.all_reduce_mean_(list(gradients.values()))
    return gradients


def shuffle() -> dict[str, Tensor]:
    x = part(data((12, 3), 3))
    order = torch.Generator().manual_seed(11)
    kept = shuffled(lambda t: 2 * t, x, order)
    seen: list[Tensor] = []
    shuffled(lambda t: seen.append(t) or t, x, torch.Generator().manual_seed(11))
    return {"kept": kept, "seen": seen[0]}


def teachers() -> dict[str, Tensor]:
    """Local and global history on different samples."""
    student = maybe_ddp(network())
    local, together = MomentumTeacher(student), MomentumTeacher(student, history="global")
    result = {}
    for step in range(3):
        for teacher in (local, together):
            teacher.alpha = 0.5
            for view in range(2):
                teacher(part(data((12, 3, 5, 5), 40 + 2 * step + view)))
            teacher.update(student, weight=0.0)
        if step == 0:
            result["first_local_mean"] = local.network[1].running_mean.clone()
            result["first_global_mean"] = together.network[1].running_mean.clone()
    result |= {f"local.{name}": t for name, t in local.encoder_state().items()}
    return result | {f"global.{name}": t for name, t in together.encoder_state().items()}


def choosing() -> dict[str, Tensor]:
    """Alphas that the norms choose, with two devices in a process and a global history."""
    student = network()
    teacher = MomentumTeacher(student, history="global", devices=2)
    chosen = []
    for step in range(30):
        teacher(part(data((16, 3, 5, 5), 70 + step)))
        teacher.update(student, weight=0.0, statistics="auto")
        chosen.append(torch.cat([norm.alphas() for norm in (teacher.network[1], teacher.network[5])], 1))
    states = {f"1.{name}": t for name, t in teacher.network[1].auto_state().items()}
    means, variances = teacher.network[1].histories()
    return {"alphas": torch.stack(chosen), "1.means": means, "1.vars": variances, **states}


def main() -> None:
    distributed.setup(torch.device("cpu"))
    results = {
        "collectives": collectives(),
        "synced": synced(uneven=False, channels_last=False),
        "synced_channels_last": synced(uneven=False, channels_last=True),
        "synced_uneven": synced(uneven=True, channels_last=False),
        "synced_network": synced_network(),
        "shuffle": shuffle(),
        "teachers": teachers(),
        "choosing": choosing(),
    }
    detached = {job: {name: t.detach() for name, t in r.items()} for job, r in results.items()}
    torch.save(detached, f"{sys.argv[1]}/{distributed.rank()}.pt")
    distributed.teardown()


if __name__ == "__main__":
    main()
