"""Stopping politely, and on all processes at the same step."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Self

import torch
from torch import Tensor

from momentum2 import distributed
from momentum2.distributed.together import any_process, raise_together
from momentum2.errors import UserError
from momentum2.runs.checkpoint import Checkpoints

#: A launcher and a scheduler may both pass on the same signal; within this many seconds it counts as one.
SAME_SIGNAL_SECONDS = 2.0


class StopSignal:
    """While open, the first SIGTERM or SIGINT is remembered and a second one ends the process at once.

    Args:
        checkpoints: Named where a run ends because a number is not finite.
        device: Where that is found out. CUDA is not waited for: there the answer comes one step late.
    """

    def __init__(self, checkpoints: Checkpoints, device: torch.device) -> None:
        self.checkpoints, self.device = checkpoints, device
        self._received: float | None = None  # when
        self._posted: dict[int, _Flags] = {}  # of this step and the one before, by step

    def __enter__(self) -> Self:
        # Python lets only the main thread have handlers; elsewhere the host program decides about signals.
        main = threading.current_thread() is threading.main_thread()
        ours = (signal.SIGTERM, signal.SIGINT) if main else ()
        self._previous = {number: signal.signal(number, self._handle) for number in ours}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received = now
            if distributed.is_main():  # os.write: a print inside a handler may interrupt another print
                os.write(
                    2, b"momentum2: Saving after this step. Send the signal again to stop immediately.\n"
                )
        elif now - self._received > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)

    def check(self, value: Tensor, step: int) -> bool:
        """Whether any process was asked to stop; a `UserError` on all if any has a NaN or infinite `value`.

        On CUDA this is known of the step before, and of this one by `settle`. One small collective, none with a single
        process. All processes must call it at the same step.
        """
        asked = torch.full_like(value, self._received is not None)
        flags = any_process(torch.stack([asked, (~torch.isfinite(value)).to(value.dtype)]))
        self._posted = {k: posted for k, posted in self._posted.items() if k == step - 1}
        self._posted[step] = _Flags(flags)
        return self.settle(step - 1 if self.device.type == "cuda" else step)

    def settle(self, step: int) -> bool:
        """What `check` found out in this step or the one before, waiting for it if need be; False before any."""
        posted = self._posted.get(step)
        if posted is None:
            return False
        stop, not_finite = posted.read()
        if not_finite:
            raise_together(_not_finite(step, self.checkpoints) if distributed.is_main() else None)
        return stop


class _Flags:
    """A few flags on their way from the device to the host."""

    def __init__(self, flags: Tensor) -> None:
        self._event = torch.cuda.Event() if flags.device.type == "cuda" else None
        self._host = flags
        if self._event is not None:
            self._host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
            self._host.copy_(flags, non_blocking=True)
            self._event.record()

    def read(self) -> list[bool]:
        """Whether each is set. Of the step before, the queue need not drain for it."""
        if self._event is not None:
            self._event.synchronize()
        return [bool(flag) for flag in self._host.tolist()]


def _not_finite(step: int, checkpoints: Checkpoints) -> UserError:
    saved = checkpoints.steps()
    kept = f"The last checkpoint (step {saved[-1]}) is usable" if saved else "There is no checkpoint yet"
    return UserError(
        f"The loss or its gradient became NaN or infinite in step {step + 1}. {kept}. Start a new run with a lower "
        "learning rate, gradient clipping or fp32 precision."
    )
