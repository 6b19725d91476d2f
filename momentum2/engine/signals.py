"""Stopping politely, and on all processes at the same step."""

import os
import signal
import time
from types import FrameType
from typing import NamedTuple, Self

import torch
from torch import Tensor

from momentum2.engine.together import any_process, is_first

#: A launcher and a scheduler may both pass on the same signal; within so many seconds it counts as one.
SAME_SIGNAL_SECONDS = 2.0


class Agreement(NamedTuple):
    """What all processes agree on after a step."""

    stop: bool
    finite: bool


class StopSignal:
    """While it is open, the first SIGTERM or SIGINT is remembered and a second one ends the process at once."""

    def __init__(self) -> None:
        self._received: float | None = None  # when

    def __enter__(self) -> Self:
        self._previous = {s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received = now
            if is_first():  # os.write: a print inside a handler may interrupt another print
                os.write(2, b"momentum2: saving after this step; a second signal stops at once.\n")
        elif now - self._received > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)

    def agree(self, finite: Tensor) -> Agreement:
        """Whether any process was asked to stop, and whether `finite` (a bool scalar) holds on all of them.

        One small collective, none with a single process. All processes must call it at the same step.
        """
        asked = torch.full((), self._received is not None, device=finite.device)
        stop, bad = any_process(torch.stack([asked, ~finite]).to(torch.uint8)).tolist()
        return Agreement(stop=bool(stop), finite=not bad)
