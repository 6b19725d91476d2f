"""Several processes that decide as one: what one of them finds out, all of them know.

Without a process group every function is free and acts as the only process. Collectives of bytes travel as
plain `uint8` tensors; nothing is pickled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from momentum2 import distributed
from momentum2.errors import ProcessLost, SaidElsewhere, UserError


def broadcast_bytes(payload: bytes, source: int = 0) -> bytes:
    """`payload` of process `source`, on all processes."""
    if distributed.world_size() == 1:
        return payload
    mine = distributed.rank() == source
    size = torch.tensor(len(payload) if mine else 0, device=group_device())
    dist.broadcast(size, source)
    data = _to_tensor(payload) if mine else torch.empty(int(size), dtype=torch.uint8, device=group_device())
    dist.broadcast(data, source)
    return payload if mine else _to_bytes(data)


def gather_bytes(payload: bytes) -> list[bytes]:
    """The payloads of all processes, which must be equally long, on process 0; an empty list elsewhere."""
    if distributed.world_size() == 1:
        return [payload]
    data = _to_tensor(payload)
    parts = [torch.empty_like(data) for _ in range(distributed.world_size() if distributed.is_main() else 0)]
    dist.gather(data, parts or None)
    return [_to_bytes(part) for part in parts]


def any_process(flags: Tensor) -> Tensor:
    """Elementwise "or" of `flags` (0 or 1) over all processes, in one collective."""
    if distributed.world_size() > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return flags


def raise_together(problem: UserError | None) -> None:
    """Raise an error on all processes if any of them has a problem: the first one's, elsewhere `SaidElsewhere`."""
    if distributed.world_size() == 1:
        if problem:
            raise problem
        return
    world = distributed.world_size()
    who = torch.tensor(distributed.rank() if problem else world, device=group_device())
    dist.all_reduce(who, dist.ReduceOp.MIN)
    if int(who) < world:
        sentence = broadcast_bytes(str(problem or "").encode(), source=int(who)).decode()
        raise problem if problem and int(who) == distributed.rank() else SaidElsewhere(sentence)


def on_first(work: Callable[[], list[bytes]]) -> list[bytes]:
    """Run `work` on process 0; its result, or its `UserError`, reaches all processes."""
    result: list[bytes] = []
    problem: UserError | None = None
    if distributed.is_main():
        try:
            result = work()
        except UserError as error:
            problem = error
    raise_together(problem)
    count = int.from_bytes(broadcast_bytes(len(result).to_bytes(8, "big")), "big")
    return [broadcast_bytes(result[i] if distributed.is_main() else b"") for i in range(count)]


@contextmanager
def lost_process() -> Iterator[None]:
    """Turn the many errors that a collective gives when another process has died into one `ProcessLost`."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ProcessLost(
            f"Another process of this run died ({reason}). Run the same command again to resume."
        ) from error


@contextmanager
def joined(device: torch.device) -> Iterator[None]:
    """Inside, the processes that torchrun started work together; a lost one is a `ProcessLost`.

    A group that the host program has made already is used and left as it is.
    """
    ours = not distributed.is_joined()
    if ours:
        distributed.setup(device)
    try:
        with lost_process():
            yield
    except BaseException:
        if ours:
            distributed.abandon()
        raise
    if ours:
        distributed.teardown()


def _is_lost_peer(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()  # gloo raises plain RuntimeErrors
    return any(sign in text for sign in ("gloo", "connection reset", "connection closed", "broken pipe"))


def group_device() -> torch.device:
    """Where collectives want their tensors."""
    nccl = distributed.world_size() > 1 and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _to_tensor(payload: bytes) -> Tensor:
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device=group_device())
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(group_device())


def _to_bytes(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
