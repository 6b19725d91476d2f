"""Checkpoints that are whole or absent, and are never unpickled.

One directory per step, `step-00001000/`: `shared.safetensors` (parameters, optimizer and buffers; where devices differ,
device 0's), `devices.safetensors` (each device's history of batch statistics, (D, c) in the order of the global batch,
and what alpha is chosen from where norms choose it), `state.json` and `manifest.json` (SHA-256 of the others). Nothing
in them is a process's: what four wrote, one or two resume. Version 0.1 wrote no format, and `ranks.safetensors`
with the statistics of each process as `rank0/NAME`.

A checkpoint is written under a temporary name, synced and renamed, so a kill or a full disk at any moment leaves the
previous ones as they were. Process 0 alone reads and writes, and hands on what it read. A thread writes: the tensors
are copied at once, and training goes on.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from momentum2 import distributed
from momentum2.distributed.together import gather_bytes, on_first, raise_together
from momentum2.errors import UserError
from momentum2.files import (
    parse_json,
    read,
    read_json,
    remove_unfinished,
    remove_whole,
    whole_folder,
    write_new,
    write_parts,
)
from momentum2.runs.names import STEP
from momentum2.weights import on_cpu, safetensors_parts

log = logging.getLogger("momentum2")

FORMAT = 2
STATE, SHARED, DEVICES, RANKS = "state.json", "shared.safetensors", "devices.safetensors", "ranks.safetensors"
MANIFEST = "manifest.json"
_SMALL = 10_000_000  # bytes; of state and manifest


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to resume after `step` steps; `devices` has a row per device, (D, c)."""

    step: int
    shared: dict[str, Tensor]
    devices: dict[str, Tensor]
    info: dict[str, Any]


class _Writer:
    """A thread that writes the checkpoint of a step, and what went wrong."""

    def __init__(self, step: int, write: Callable[[], None]) -> None:
        self.step = step
        self.error: BaseException | None = None

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="momentum2-checkpoint")
        self.thread.start()


class Damaged(Exception):
    """A checkpoint that is not what was written, in words."""


class Checkpoints:
    """The checkpoints of one run in `directory`, of which the `keep` newest stay.

    All processes call `begin`, `finish`, `save` and `load`. `config_hash` names the settings that numbers depend on.
    """

    def __init__(self, directory: Path, keep: int, config_hash: str) -> None:
        self.directory, self.keep, self.config_hash = directory, keep, config_hash
        self._writer: _Writer | None = None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first (meaningful on process 0); waits for one that is written."""
        self.wait()
        return self._steps()

    def _steps(self) -> list[int]:
        names = (path.name.removeprefix(STEP) for path in self.directory.glob(f"{STEP}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def save(
        self, step: int, shared: Mapping[str, Tensor], devices: Mapping[str, Tensor], info: Mapping[str, Any]
    ) -> None:
        """`begin`, then `finish`."""
        self.begin(step, shared, devices, info)
        self.finish()

    def begin(
        self, step: int, shared: Mapping[str, Tensor], devices: Mapping[str, Tensor], info: Mapping[str, Any]
    ) -> None:
        """Save the state after `step` steps: `shared` of process 0, and the rows of every process's `devices`.

        The tensors may change afterwards: a thread looks at copies and writes them. Raises a `UserError`, on all
        processes, if the checkpoint before could not be written.
        """
        self.finish()
        raise_together(_not_finite(step, devices))
        parts = gather_bytes(safetensors.torch.save(on_cpu(devices)))
        if distributed.is_main():
            copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in shared.items()}
            self._writer = _Writer(step, partial(self._write, step, copies, parts, info))

    def finish(self) -> None:
        """Wait until what `begin` began is on the disk.

        Raises a `UserError`, on all processes, if a number was not finite or a file could not be written.
        """
        problem: UserError | None = None
        writer = self._writer
        self.wait()
        self._writer = None
        if writer is not None and isinstance(writer.error, OSError):
            problem = self._not_saved(writer.step, writer.error)
        elif writer is not None and isinstance(writer.error, UserError):
            problem = writer.error
        elif writer is not None and writer.error is not None:
            raise writer.error
        raise_together(problem)

    def wait(self) -> None:
        """Wait until nothing is being written, whether that failed or not."""
        if self._writer is not None:
            self._writer.thread.join()

    def load(self) -> Checkpoint | None:
        """The newest intact checkpoint, the same on all processes; None if there is none yet."""
        files = on_first(self._newest)
        if not files:
            return None
        state = parse_state(files[0])
        shared, devices = parse_tensors(files)
        return Checkpoint(state["step"], shared, devices, state["info"])

    def info(self) -> dict[str, Any]:
        """What `save` was last told to keep beside the tensors, the same on all processes; empty at first."""
        state = on_first(lambda: self._newest()[:1])
        return dict(parse_state(state[0])["info"]) if state else {}

    def _write(
        self, step: int, shared: Mapping[str, Tensor], parts: list[bytes], info: Mapping[str, Any]
    ) -> None:
        if problem := _not_finite(step, shared):
            raise problem
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.directory)
        final = self.path(step)
        if final.exists():
            try:
                read_files(final)
                return  # a run that was resumed here and stopped again before its next step
            except Damaged:
                remove_whole(final)
        state = {
            "format": FORMAT,
            "step": step,
            "world": len(parts),
            "config": self.config_hash,
            "tensors": len(shared),
            "info": dict(info),
        }
        rows = [safetensors.torch.load(part) for part in parts]
        devices = {name: torch.cat([of_process[name] for of_process in rows]) for name in rows[0]}
        with whole_folder(final) as folder:
            manifest = {
                STATE: write_parts(folder / STATE, [json.dumps(state).encode()]),
                SHARED: write_parts(folder / SHARED, safetensors_parts(shared)),
                DEVICES: write_parts(folder / DEVICES, safetensors_parts(devices)),
            }
            write_new(folder / MANIFEST, json.dumps(manifest, indent=1))
        for old in [s for s in self._steps() if s <= step][: -self.keep]:
            remove_whole(self.path(old))

    def _newest(self) -> list[bytes]:
        """Contents of the newest intact checkpoint; empty if there is no checkpoint at all."""
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                files = read_files(path)
            except Damaged as damage:
                log.warning("%s is corrupt (%s). Using the previous checkpoint instead.", path, damage)
                continue
            if parse_state(files[0])["config"] != self.config_hash:
                raise UserError(
                    f"{path} was written with different settings than this run's. Choose another run directory."
                )
            return files
        if steps:
            raise UserError(
                f"All checkpoints in {self.directory} are corrupt. Delete that folder to start from step 0."
            )
        return []

    def path(self, step: int) -> Path:
        return self.directory / f"{STEP}{step:08d}"

    def _not_saved(self, step: int, error: OSError) -> UserError:
        remove_unfinished(self.directory)  # make room
        kept = [s for s in self.steps() if s < step]
        intact = f"The checkpoint at step {kept[-1]} is intact" if kept else "There is no earlier checkpoint"
        return UserError(
            f"The checkpoint at step {step} cannot be written to {self.directory} ({error.strerror}). "
            f"{intact}. Fix this and run the same command again to resume."
        )


def read_files(path: Path) -> list[bytes]:
    """State, shared tensors and devices' (or ranks') tensors of one checkpoint, verified by hash and parsed."""
    try:
        manifest = read_json(path / MANIFEST, _SMALL)
        names = (STATE, SHARED, DEVICES if DEVICES in manifest else RANKS)
        files = [read(path / STATE, _SMALL), *(read(path / name, 2**40) for name in names[1:])]
        for name, data in zip(names, files, strict=True):
            if manifest.get(name) != hashlib.sha256(data).hexdigest():
                raise Damaged(f"{name} is not what was written")
        state = parse_state(files[0])
        shared, _ = (safetensors.torch.load(data) for data in files[1:])
        if len(shared) != state.get("tensors", len(shared)):
            raise Damaged(f"{SHARED} has {len(shared)} of {state['tensors']} tensors")
    except OSError as error:
        raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, SafetensorError):
        raise Damaged("its files cannot be parsed") from None
    if state.get("format", 1) > FORMAT:
        raise UserError(f"{path} was written by a later version of momentum2. Use that version.")
    return files


def parse_state(data: bytes) -> dict[str, Any]:
    """A `state.json`; a `ValueError` if it is not one."""
    state = parse_json(data)
    kinds = {"step": int, "world": int, "config": str, "info": dict}
    if not isinstance(state, dict) or any(type(state.get(name)) is not kind for name, kind in kinds.items()):
        raise ValueError("it is not the state of a run")
    info = state["info"]
    counts = [info.get(name, 1) for name in ("threads", "images", "devices")]
    places = info.get("encoders", {})
    if (
        state["step"] < 0
        or type(state.get("format", 1)) is not int
        or any(type(count) is not int or count < 1 for count in (state["world"], *counts))
        or not isinstance(places, dict)
        or not all(isinstance(place, str) for place in places.values())
    ):
        raise ValueError("it is not the state of a run")
    return state


def parse_tensors(files: list[bytes]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Shared tensors and those with a row per device, from what `read_files` gives."""
    state, shared, rest = parse_state(files[0]), *(safetensors.torch.load(data) for data in files[1:])
    if "format" in state:
        return shared, rest
    # Version 0.1: each process has the statistics of its own device, and process 0's are those of device 0.
    ranks = [
        {name.removeprefix(f"rank{r}/"): t for name, t in rest.items() if name.startswith(f"rank{r}/")}
        for r in range(state["world"])
    ]
    devices = {name: torch.stack([own[name] for own in ranks]) for name in ranks[0]}
    return shared | ranks[0], devices


def _not_finite(step: int, tensors: Mapping[str, Tensor]) -> UserError | None:
    floating = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not floating:
        return None
    largest = [t.to(torch.float64) for t in torch._foreach_norm(list(floating.values()), float("inf"))]
    if bool(torch.isfinite(torch.stack(largest)).all()):
        return None
    for name, tensor in floating.items():
        if not bool(torch.isfinite(tensor).all()):
            return UserError(
                f"{name} is not finite after step {step}, so no checkpoint was written. Use a lower learning rate, "
                "gradient clipping or fp32 precision."
            )
    return None
