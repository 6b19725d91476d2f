"""The fake device counts what a GPU would wait for, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake import CUDA, CudaTensor, fake_cuda
from torch import Tensor, nn

CPU = torch.arange(4)

#: What is done with x (4×3 on the device): waits and pageable copies; and whether it cannot go on.
RULES: dict[str, tuple[Callable[[Tensor], Any], int, int, bool]] = {
    "float": (lambda x: float(x.sum()), 1, 0, False),
    "item": (lambda x: x.sum().item(), 1, 0, False),
    "if any": (lambda x: 1 if x.any() else 0, 1, 0, False),
    "tolist": (lambda x: x.tolist(), 1, 0, False),
    "cpu": (lambda x: x.cpu(), 1, 0, False),
    "mask": (lambda x: x[x > 0], 1, 0, True),
    "nonzero": (lambda x: x.nonzero(), 1, 0, True),
    "svdvals": (lambda x: torch.linalg.svdvals(x), 1, 0, False),
    "where with a number of the CPU": (lambda x: torch.where(x > 0, x, torch.tensor(0.0)), 1, 0, False),
    "where with a number": (lambda x: torch.where(x > 0, x, 0.0), 0, 0, False),
    "copy": (lambda x: CPU.to(CUDA), 1, 1, False),
    "copy without waiting": (lambda x: CPU.to(CUDA, non_blocking=True), 0, 1, False),
    "pinned copy": (lambda x: CPU.pin_memory().to(CUDA), 1, 0, False),
    "pinned copy without waiting": (lambda x: CPU.pin_memory().to(CUDA, non_blocking=True), 0, 0, False),
    "copy into": (lambda x: x[0].copy_(torch.zeros(3)), 1, 1, False),
    "copy to the host": (lambda x: torch.zeros(4, 3).copy_(x, non_blocking=True), 1, 0, False),
    "copy to pinned memory": (
        lambda x: torch.zeros(4, 3).pin_memory().copy_(x, non_blocking=True),
        0,
        0,
        False,
    ),
    "index by a tensor of the CPU": (lambda x: x[CPU], 1, 1, False),
    "add a tensor of the CPU": (lambda x: x.add_(torch.zeros(4, 3)), 0, 0, True),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), 0, 0, False),
    "zeros": (lambda x: torch.zeros(3, device=CUDA), 0, 0, False),
    "full_like": (lambda x: torch.full_like(x, 2), 0, 0, False),
    "tensor": (lambda x: torch.tensor([1.0, 2.0], device="cuda"), 1, 1, False),
    "synchronize": (lambda x: torch.cuda.synchronize(), 1, 0, False),
}


@pytest.mark.parametrize("rule", RULES)
def test_what_waits(rule: str):
    act, waits, pageable, ends = RULES[rule]
    with fake_cuda() as device:
        x = torch.zeros(4, 3, device="cuda")
        device.step()
        if ends:
            with pytest.raises(RuntimeError):
                act(x)
        else:
            act(x)
        assert (sum(device.now.waits.values()), sum(device.now.pageable.values())) == (waits, pageable)


def test_an_event_of_the_last_step_is_not_waited_for():
    with fake_cuda() as device:
        event = torch.cuda.Event()
        event.record()
        device.step()
        event.synchronize()
        assert not device.now.waits
        event.record()
        assert not event.query()
        event.synchronize()
        assert sum(device.now.waits.values()) == 1


def test_autocast_casts_what_it_casts_and_keeps_the_weights():
    with fake_cuda() as device:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2)).to(
            "cuda"
        )
        assert all(isinstance(p, CudaTensor) for p in net.parameters())
        x = torch.zeros(2, 3, 8, 8, device="cuda")
        device.step()
        with torch.autocast("cuda", torch.bfloat16):
            y = net(net[0](x)[:, :3].repeat(1, 1, 1, 1).new_zeros(2, 3, 8, 8)) + net(x)
        assert y.dtype == torch.bfloat16
        assert device.dtypes["convolution"] == {torch.bfloat16}
        # Three inputs of the first convolution, one of which is used twice; the weights once.
        y.float().sum().backward()
        assert net[0].weight.grad.shape == (4, 3, 3, 3)
        assert net[0].weight.grad.dtype == torch.float32
