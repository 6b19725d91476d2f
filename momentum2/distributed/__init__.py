"""Who am I among the processes, and the few collectives we use.

Everything here is free in a single process: no collective, no copy. Several processes are started with
`torchrun`, whose environment `setup` reads.
"""

import hashlib
import os
import time
import uuid
import warnings
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from momentum2.errors import ProcessLost, reason

#: How long a process waits for the others in a collective: their images may take long to prepare. A lost process is
#: noticed by torchrun.
_TIMEOUT = timedelta(minutes=60)
#: How long a process waits for the others to come at all: they are started together, and have done nothing yet.
_JOINING = timedelta(minutes=10)


def rank() -> int:
    """The number of this process, 0 in a single process."""
    return dist.get_rank() if is_joined() else 0


def world_size() -> int:
    """How many processes train together, 1 in a single process."""
    return dist.get_world_size() if is_joined() else 1


def is_joined() -> bool:
    """Whether there is a group of processes already."""
    return dist.is_available() and dist.is_initialized()


def is_main() -> bool:
    """True in the one process that writes files and prints."""
    return rank() == 0


_store: Store | None = None  # of the processes that `setup` joined


def is_first_to_say(sentence: str) -> bool:
    """Whether no other process has said the sentence yet: a mistake that all of them find is told once.

    There is no collective in it, because the others may not have found it. Before the processes have joined, the
    first one of each machine speaks.
    """
    if _store is None:
        place, alone = os.environ.get("LOCAL_RANK", "0"), os.environ.get("WORLD_SIZE", "1") == "1"
        return alone or place == "0" or not place.isdecimal()  # whatever else it says, somebody must speak
    try:
        return bool(_store.add(f"said/{hashlib.sha256(sentence.encode()).hexdigest()}", 1) == 1)
    except RuntimeError:  # whoever kept the store has gone
        return True


def setup(device: torch.device) -> None:
    """Join the processes that torchrun started: nccl on CUDA, gloo elsewhere. Nothing in a single process.

    A `device` of "cuda" without a number becomes the GPU of this process's LOCAL_RANK.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    global _store
    try:
        store, rank, world = _fresh_store()
    except dist.DistError as error:
        raise ProcessLost(
            f"Not all processes of this run started within {_JOINING.seconds / 60:g} minutes ({reason(error)}). Run "
            "the same command again, on all machines if there are several."
        ) from error
    _store = store
    if device.type != "cuda":
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
        return
    index = int(os.environ["LOCAL_RANK"]) if device.index is None else device.index
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=world, device_id=device, timeout=_TIMEOUT
    )


def _fresh_store() -> tuple[Store, int, int]:
    """torchrun's store under a name that is new for this start of the processes; rank; number of processes.

    torchrun keeps one store through its restarts; processes that read the addresses of their dead
    predecessors there fail or wait forever. Its count of restarts differs between machines, so it cannot
    tell the starts apart. Process 0 therefore draws a name, and gives it to each process that has greeted it
    with a key of its own, until all have taken it. Nobody waits for the answer to an old greeting.
    """
    store, rank, world = next(rendezvous("env://", timeout=_JOINING))
    name = uuid.uuid4().hex
    if rank == 0:
        end = time.monotonic() + _JOINING.total_seconds()
        while (came := store.add(f"{name}/joined", 0)) < world - 1:
            if time.monotonic() > end:
                raise dist.DistStoreError(f"{came} of {world - 1} others came")
            for r in range(1, world):
                if store.check([f"greeting/{r}"]):
                    store.set(f"answer/{store.get(f'greeting/{r}').decode()}", name)
            time.sleep(0.01)
    else:
        key = name
        store.set(f"greeting/{rank}", key)
        name = store.get(f"answer/{key}").decode()
        store.add(f"{name}/joined", 1)
    return PrefixStore(name, store), rank, world


def teardown() -> None:
    """Leave the group of processes. Does nothing in a single process."""
    if is_joined():
        dist.destroy_process_group()


def abandon() -> None:
    """Leave the group after an error that the other processes may not have.

    NCCL's teardown would wait for them, and they for this process, so there the group stays: `main` then ends the
    process at once. Gloo's closes its connections, and the others notice.
    """
    if is_joined() and dist.get_backend() != "nccl":
        dist.destroy_process_group()


def data_parallel(module: nn.Module) -> DistributedDataParallel:
    """`module` with gradients averaged over the processes; its buffers stay with their process."""
    with warnings.catch_warnings():
        # torch would have buffers synced once at the start instead: over those that a checkpoint has restored.
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        # Gradients that are views of what travels: no copy of them all, and their memory once.
        return DistributedDataParallel(module, broadcast_buffers=False, gradient_as_bucket_view=True)


def barrier() -> None:
    """Wait until every process is here."""
    if world_size() > 1:
        dist.barrier()


def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by process 0's: one flat collective per dtype, no gradient."""
    if world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([t.detach().reshape(-1) for t in group])
        dist.broadcast(flat, 0)
        _unflatten(flat, group)


@torch.no_grad()
def _unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    """Write the parts of `flat` into the tensors."""
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        # Every rank's loss depends on this rank's x, each through its own copy of the sum.
        return all_reduce_sum(grad)


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of `x` over the processes, on all of them. Differentiable: gradients are summed too."""
    return x if world_size() == 1 else _AllReduceSum.apply(x)  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        x = x.contiguous()
        everything = x.new_empty(dist.get_world_size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(everything, x)
        return everything

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return all_reduce_sum(grad).chunk(dist.get_world_size())[dist.get_rank()]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sizes = sent, received  # type: ignore[attr-defined]
        parts = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(parts, x.contiguous(), received, sent)
        return parts

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.sizes  # type: ignore[attr-defined]
        return exchange(grad, received, sent), None, None


def exchange(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Rows from all processes, in the order of their ranks. Differentiable.

    Args:
        x: (n, ...), first the rows for process 0, then those for process 1, and so on.
        sent: How many rows each process gets of x.
        received: How many this process gets of each.
    """
    return x if world_size() == 1 else _Exchange.apply(x, sent, received)  # type: ignore[no-untyped-call]


def gather(x: Tensor, even: bool = True) -> Tensor:
    """Every process's `x`, concatenated along dim 0 in the order of their ranks.

    Differentiable: the gradient that reaches `x` is the sum over the losses of all processes.

    Args:
        x: (n, ...); all dimensions but the first must agree on all processes.
        even: n is the same on all processes. False costs one more small collective to learn the sizes.
    """
    if world_size() == 1:
        return x
    if even:
        return _Gather.apply(x)  # type: ignore[no-untyped-call,no-any-return]
    sizes = gather(torch.tensor([len(x)], device=x.device)).tolist()
    padded = torch.cat([x, x.new_zeros(max(sizes) - len(x), *x.shape[1:])])
    parts = gather(padded).chunk(world_size())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class PendingMean:
    """An all-reduce under way; `wait` finishes it and writes the means into the tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._flat = torch.cat([t.detach().reshape(-1) for t in tensors])
        self._work = dist.all_reduce(self._flat, async_op=True)

    @torch.no_grad()
    def wait(self) -> None:
        self._work.wait()
        self._flat /= world_size()
        _unflatten(self._flat, self._tensors)


def start_all_reduce_mean(tensors: list[Tensor]) -> PendingMean | None:
    """Begin `all_reduce_mean_` and return at once; nothing is written before its `wait`.

    None in a single process, where the mean is there already.
    """
    return PendingMean(tensors) if world_size() > 1 and tensors else None


def all_reduce_mean_(tensors: list[Tensor]) -> None:
    """Replace each tensor by its mean over the processes: one flat collective, no gradient.

    The tensors must share one floating dtype and device.
    """
    pending = start_all_reduce_mean(tensors)
    if pending is not None:
        pending.wait()
