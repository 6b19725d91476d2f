"""Checkpoints that are whole or absent, and are never unpickled.

One directory per step, `step-00001000/`: `shared.safetensors` (what is equal on all processes),
`ranks.safetensors` (what each process has of its own, as `rank0/NAME`), `state.json` and `manifest.json`
(SHA-256 of the others). It is written under a temporary name, synced and renamed, so a kill or a full disk at
any moment leaves the previous ones as they were. Process 0 alone reads and writes, and hands on what it read.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.engine.together import gather_bytes, on_first, raise_together
from momentum2.errors import UserError

log = logging.getLogger("momentum2")

FILES = ("state.json", "shared.safetensors", "ranks.safetensors")
MANIFEST = "manifest.json"
TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on after `step` steps."""

    step: int
    shared: dict[str, Tensor]
    own: dict[str, Tensor]
    info: dict[str, Any]


class Damaged(Exception):
    """A checkpoint that is not what was written, in words."""


class Checkpoints:
    """The checkpoints of one run in `directory`, of which the `keep` newest stay.

    All processes call `save` and `load`. `config_hash` names the settings that the numbers depend on.
    """

    def __init__(self, directory: Path, keep: int, config_hash: str) -> None:
        if keep < 1:
            raise UserError(f"--train.keep must be at least 1, not {keep}.")
        self.directory, self.keep, self.config_hash = directory, keep, config_hash

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first (meaningful on process 0)."""
        names = (path.name.removeprefix("step-") for path in self.directory.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def save(
        self, step: int, shared: Mapping[str, Tensor], own: Mapping[str, Tensor], info: Mapping[str, Any]
    ) -> None:
        """Save the state after `step` steps: `shared` of process 0, `own` of every process.

        Raises a `UserError`, on all processes, if a number is not finite or a file cannot be written.
        """
        raise_together(_not_finite(step, {**shared, **own}))
        ranks = gather_bytes(safetensors.torch.save(_on_cpu(own)))
        problem = None
        if distributed.is_main():
            try:
                self._write(step, shared, ranks, info)
            except OSError as error:
                problem = self._not_saved(step, error)
        raise_together(problem)

    def load(self) -> Checkpoint | None:
        """The newest undamaged checkpoint, the same on all processes; None if there is none yet.

        When the number of processes has changed, process r takes over what process r mod (old number) had.
        """
        files = on_first(self._newest)
        if not files:
            return None
        state = json.loads(files[0])
        shared, ranks = (safetensors.torch.load(data) for data in files[1:])
        prefix = f"rank{distributed.rank() % state['world']}/"
        own = {name.removeprefix(prefix): t for name, t in ranks.items() if name.startswith(prefix)}
        return Checkpoint(state["step"], shared, own, state["info"])

    def info(self) -> dict[str, Any]:
        """What `save` was last told to keep beside the tensors, the same on all processes; empty at first."""
        state = on_first(lambda: self._newest()[:1])
        return dict(json.loads(state[0])["info"]) if state else {}

    def _write(
        self, step: int, shared: Mapping[str, Tensor], ranks: list[bytes], info: Mapping[str, Any]
    ) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover)
        final = self.path(step)
        if final.exists():
            try:
                read_files(final)
                return  # a run that was resumed here and stopped again before its next step
            except Damaged:
                self._remove(final)
        state = {"step": step, "world": len(ranks), "config": self.config_hash, "info": dict(info)}
        own = {
            f"rank{r}/{name}": t
            for r, part in enumerate(ranks)
            for name, t in safetensors.torch.load(part).items()
        }
        contents = (
            json.dumps(state).encode(),
            safetensors.torch.save(_on_cpu(shared)),
            safetensors.torch.save(own),
        )
        temporary = self.directory / f"{TEMPORARY}{final.name}"
        temporary.mkdir()
        manifest = {}
        for name, data in zip(FILES, contents, strict=True):
            write_synced(temporary / name, data)
            manifest[name] = hashlib.sha256(data).hexdigest()
        write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync_directory(temporary)
        temporary.rename(final)
        sync_directory(self.directory)
        for old in [s for s in self.steps() if s <= step][: -self.keep]:
            self._remove(self.path(old))

    def _newest(self) -> list[bytes]:
        """Contents of `FILES` of the newest undamaged checkpoint; empty if there is no checkpoint at all."""
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                files = read_files(path)
            except Damaged as damage:
                log.warning("%s is damaged (%s); falling back to the checkpoint before it.", path, damage)
                continue
            if json.loads(files[0])["config"] != self.config_hash:
                raise UserError(f"{path} was made with other settings than this run's; choose another --out.")
            return files
        if steps:
            raise UserError(
                f"All checkpoints in {self.directory} are damaged; delete that folder to start from step 0."
            )
        return []

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint so that a kill never leaves half of one under its name."""
        doomed = path.rename(self.directory / f"{TEMPORARY}old-{path.name}")
        shutil.rmtree(doomed)

    def _not_saved(self, step: int, error: OSError) -> str:
        for leftover in self.directory.glob(f"{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)  # make room; a leftover is removed by the next save
        kept = [s for s in self.steps() if s < step]
        intact = f"the checkpoint of step {kept[-1]} is intact" if kept else "there is no earlier checkpoint"
        return (
            f"The checkpoint of step {step} cannot be written to {self.directory} ({error.strerror}): "
            f"{intact}; mend that and run the same command again."
        )


def read_files(path: Path) -> list[bytes]:
    """Contents of `FILES` of one checkpoint, verified: right hashes, and safetensors that can be parsed."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files = [(path / name).read_bytes() for name in FILES]
        for name, data in zip(FILES, files, strict=True):
            if manifest.get(name) != hashlib.sha256(data).hexdigest():
                raise Damaged(f"{name} is not what was written")
        for data in files[1:]:
            safetensors.torch.load(data)
    except OSError as error:
        raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from None
    except (ValueError, AttributeError, SafetensorError):
        raise Damaged("its files cannot be parsed") from None
    return files


def collect(
    method: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a run by name, not copied: those equal on all processes, and this process's own.

    A process has its own normalisation statistics, that is, all buffers of a module with a `running_mean`.
    Parameters, other buffers and the optimizer's state are equal on all processes.
    """
    norms = {name for name, module in method.named_modules() if hasattr(module, "running_mean")}
    parameters = dict(method.named_parameters())
    shared: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    for name, tensor in method.state_dict().items():
        is_own = name not in parameters and name.rpartition(".")[0] in norms
        (own if is_own else shared)[f"method/{name}"] = tensor
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # such as the momentum of plain SGD, which has none
                shared[f"optimizer/{name}/{key}"] = value
    return shared, own


def restore(method: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Put a checkpoint back, strictly by name."""
    saved = {**checkpoint.shared, **checkpoint.own}
    state = {name.removeprefix("method/"): t for name, t in saved.items() if name.startswith("method/")}
    differing = list(_differences(method.state_dict(), state))
    parameters = dict(method.named_parameters())
    optimizer.state.clear()
    for full, tensor in saved.items():
        if full.startswith("optimizer/"):
            name, _, key = full.removeprefix("optimizer/").rpartition("/")
            if name not in parameters:
                differing.append(f"{full} has no parameter")
                continue
            parameter = parameters[name]
            if tensor.shape == parameter.shape:  # in the parameter's memory layout: sums keep their order
                tensor = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
            optimizer.state[parameter][key] = tensor.to(parameter.device)
    if differing:
        shown = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise UserError(f"The checkpoint of step {checkpoint.step} is of another network: {shown}.")
    method.load_state_dict(state)


def _differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            yield f"{name} is missing"
        elif name not in expected:
            yield f"{name} is unknown"
        elif (expected[name].shape, expected[name].dtype) != (found[name].shape, found[name].dtype):
            yield f"{name} is {_kind(found[name])} instead of {_kind(expected[name])}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _not_finite(step: int, tensors: Mapping[str, Tensor]) -> str | None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return (
                f"{name} is not finite after step {step}, so no checkpoint was written; lower --optim.lr, "
                "set --optim.clip_norm or use --train.precision fp32."
            )
    return None


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
