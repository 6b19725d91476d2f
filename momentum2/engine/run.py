"""The directory of a run: one process at a time, one config for ever."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import nn

from momentum2.config import MAY_CHANGE_ON_RESUME, Config
from momentum2.engine.checkpoint import Checkpoints, sync_directory, write_synced
from momentum2.engine.together import any_process, is_first, on_first
from momentum2.errors import UserError

Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True)
class Run:
    """An open run directory: this process, or process 0 of this job, is the only one that works in it."""

    directory: Path
    checkpoints: Checkpoints

    def check_space(self, method: nn.Module) -> None:
        """Refuse, on all processes, to start a run whose checkpoints will not fit on the disk."""
        on_first(lambda: self._check_space(method))

    def _check_space(self, method: nn.Module) -> list[bytes]:
        state = [t for t in method.state_dict().values() if isinstance(t, torch.Tensor)]
        trained = [p for p in method.parameters() if p.requires_grad]  # the optimizer keeps one tensor for each
        size = sum(t.numel() * t.element_size() for t in state + trained)
        to_come = max(1, self.checkpoints.keep + 1 - len(self.checkpoints.steps()))
        free = shutil.disk_usage(self.directory).free
        if free < to_come * size:
            raise UserError(
                f"The checkpoints need {to_come * size / 1e9:.3g} GB in {self.directory} and {free / 1e9:.3g} GB are "
                "free; make room, lower --train.keep or choose another --out."
            )
        return []


@contextmanager
def open_run(out: Path, config: Config, resume: Resume) -> Iterator[Run]:
    """Create or reopen the run in `out`, or say in one sentence, on all processes, why not.

    Process 0 holds the lock of the directory and writes `config.yaml`; nothing that exists is ever deleted.
    """
    run = Run(out, Checkpoints(out / "checkpoints", config.train.keep, _config_hash(config)))
    exists = (out / "config.yaml").exists()
    elsewhere = bool(any_process(torch.tensor(exists, dtype=torch.uint8, device=_flag_device()))) and not exists
    lock: list[int] = []

    def prepare() -> list[bytes]:
        if elsewhere:
            raise UserError(
                f"{out} exists on another machine but not on that of process 0; put it on a file system that all "
                "machines share, or start on the same machine first."
            )
        try:
            out.mkdir(parents=True, exist_ok=True)
            lock.append(_lock(out))
            _check(run, config, resume)
            _write_config(out, config)
        except OSError as error:
            raise UserError(f"{out} cannot be written to ({error.strerror}); choose another --out.") from None
        return []

    try:
        on_first(prepare)
        yield run
    finally:
        for descriptor in lock:
            os.close(descriptor)
