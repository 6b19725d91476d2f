"""The directory of a run: one process at a time, one config forever."""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import yaml
from torch import nn

from momentum2 import distributed
from momentum2.config import MAY_CHANGE_ON_RESUME, Config, Resume, TrainConfig
from momentum2.distributed.together import (
    any_process,
    broadcast_bytes,
    group_device,
    on_first,
    raise_together,
)
from momentum2.errors import SettingError, UserError
from momentum2.files import append, read, real, remove_unfinished, write_whole
from momentum2.runs.checkpoint import STATE, Checkpoints, parse_state
from momentum2.runs.names import CHECKPOINTS, CONFIG, ENCODER, LOCK
from momentum2.settings import flatten, from_file
from momentum2.spelling import inexact
from momentum2.yaml_settings import LARGEST_FILE, read_settings

_DAY = 24 * 3600.0  # seconds
#: Settings without which a run of an earlier version may not go on: it stretched images of more than 8 bits by itself.
_ADDED = frozenset({"data.window", "eval_data.window"})
_HELD: set[Path] = set()
_HELD_LOCK = threading.Lock()


class RunConfig(Protocol):
    """Any frozen dataclass of settings with a `train` section."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def train(self) -> TrainConfig: ...


@dataclass(frozen=True)
class OpenRun:
    """An open run directory: no other job works in it."""

    directory: Path
    checkpoints: Checkpoints
    settings: bytes = b""  # what config.yaml is to hold (process 0)

    def begin(self) -> None:
        """Write `config.yaml`: from here on `directory` holds this run. Until then a mistake has left nothing."""
        if distributed.is_main():
            write_whole(self.directory / CONFIG, self.settings)

    def check_space(self, method: nn.Module, states: int = 1) -> None:
        """Refuse, on all processes, to start a run whose checkpoints will not fit on the disk.

        `states` is the number of tensors that the optimizer has for each trained parameter.
        """
        on_first(lambda: self._check_space(method, states))

    def _check_space(self, method: nn.Module, states: int) -> list[bytes]:
        trained = [p for p in method.parameters() if p.requires_grad]
        size = sum(t.numel() * t.element_size() for t in [*method.state_dict().values(), *trained * states])
        to_come = max(1, self.checkpoints.keep + 1 - len(self.checkpoints.steps()))
        free = shutil.disk_usage(self.directory).free
        if free < to_come * size:
            raise UserError(
                f"Checkpoints need {to_come * size / 1e9:.3g} GB but only {free / 1e9:.3g} GB is free in "
                f"{self.directory}. Free some space, lower train.keep, or choose another run directory."
            )
        return []


@contextmanager
def open_run(
    out: Path, config: RunConfig, resume: Resume, idle: frozenset[str] = frozenset()
) -> Iterator[OpenRun]:
    """Create or reopen the run in `out`, or say in one sentence, on all processes, why not.

    Process 0 holds the lock of the directory; `begin` writes `config.yaml`. Nothing that exists is deleted. `idle` are
    settings that decide nothing with this config, and so may differ from those that the run began with.
    """
    run = OpenRun(out, Checkpoints(out / CHECKPOINTS, config.train.keep, config_hash=""))
    exists = (out / CONFIG).exists()
    seen = torch.tensor(exists, dtype=torch.uint8, device=group_device())
    elsewhere = bool(any_process(seen)) and not exists
    with ExitStack() as held:

        def prepare() -> list[bytes]:
            if elsewhere:
                raise UserError(
                    f"{out} exists on another machine but not on that of process 0. Put it on a file "
                    "system that the machines share, or run process 0 where it ran before."
                )
            try:
                out.mkdir(parents=True, exist_ok=True)
                held.enter_context(_lock(out))
                held.callback(run.checkpoints.wait)  # it writes here, and this may end by an error
                _check_resume(run, config, resume, idle)
                remove_unfinished(out, _DAY)  # others write results and pages here, without the lock
                settings = _settings_of(run, config)
                text = yaml.safe_dump(settings, sort_keys=False)
                return [_config_hash(flatten(settings)).encode(), text.encode()]
            except OSError as error:
                raise UserError(
                    f"{out} cannot be written to ({error.strerror}). Choose another run directory."
                ) from None

        digest, settings = on_first(prepare)
        run.checkpoints.config_hash = digest.decode()
        _check_same_settings(config)
        yield replace(run, settings=settings)


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the run directory, by a record lock: it ends with the process, and no worker inherits it.

    Such a lock does not keep out other threads of the same process, so what this process holds is noted too.
    """
    place = real(out)
    with _HELD_LOCK:
        if place in _HELD:
            raise UserError(
                f"{out} is in use by another thread of this program. Choose another run directory."
            )
        _HELD.add(place)
    try:
        with _record_lock(out):
            yield
    finally:
        with _HELD_LOCK:
            _HELD.discard(place)


@contextmanager
def _record_lock(out: Path) -> Iterator[None]:
    with append(out / LOCK) as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise UserError(
                f"{out} is in use by {file.read().strip() or 'another process'}. Choose another run directory."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _check_resume(run: OpenRun, config: RunConfig, resume: Resume, idle: frozenset[str]) -> None:
    out, exists = run.directory, (run.directory / CONFIG).exists()
    if resume == "never" and exists:
        raise SettingError(
            "resume",
            f"is never, but {out} already contains a run. Choose another run directory, or resume it with auto.",
        )
    if resume == "must" and not run.checkpoints.steps():
        raise SettingError(
            "resume",
            f"is must, but there is no checkpoint in {out}. Check the run directory, or start a new run with auto.",
        )
    if exists and run.checkpoints.steps():  # before the first checkpoint there is nothing to be true to
        check_config(out, config, idle)
    elif exists and (out / ENCODER).exists():
        raise UserError(
            f"{out} has a finished encoder but no checkpoints to resume from. Choose another run directory."
        )
    elif run.checkpoints.steps():
        raise UserError(
            f"{out} has checkpoints but no {CONFIG}, so it cannot be resumed safely. Choose another run directory."
        )


def check_config(out: Path, config: RunConfig, idle: frozenset[str] = frozenset()) -> None:
    """Raise a `UserError` if the run in `out` has other settings that decide what is computed."""
    state, written = _newest_state(out), _read_config(out)
    reason = inexact(written, state["world"], "format" not in state) if state else None
    if reason:
        raise UserError(
            f"{out} was started with an earlier version and cannot be resumed exactly ({reason}). Choose "
            "another run directory."
        )
    now = flatten(asdict(config))
    before = flatten(asdict(from_file(type(config)(), out / CONFIG, _world(out))))
    differing = [
        f"{name} was {before.get(name)}, now {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
        and not (_may_change(name) or name in idle or (name in _ADDED and name not in written))
    ]
    if differing:
        raise UserError(
            f"{out} was started with different settings ({'; '.join(differing)}). Use the original ones, or choose "
            f"another run directory.{_remedy(out, now, differing)}"
        )


def _remedy(out: Path, now: Mapping[str, object], differing: list[str]) -> str:
    """How to resume a pretraining as it was; how to train longer, if the length is all that differs."""
    if now.get("method.freeze_encoder") is not False:  # linear evaluation, or a detector
        return ""
    if not all(change.startswith(("train.steps ", "train.epochs ")) for change in differing):
        if any(value for name, value in now.items() if name.startswith("objects.")):  # only Python has them
            return ""
        command = shlex.join(["momentum2", "pretrain", "--config", str(out / CONFIG), "--out", str(out)])
        return f" To resume it as it was, run {command}."
    ready = "start" if (out / ENCODER).exists() else "let it finish and start"
    return f" Its schedules end with it: to train longer, {ready} another run with model.weights {out / ENCODER}."


def devices_of(out: Path) -> int | None:
    """The number of devices of the run in `out`, which has a checkpoint; None if there is none yet."""
    if not (out / CONFIG).exists() or _newest_state(out) is None:
        return None
    found = from_file(Config(), out / CONFIG, _world(out)).train.devices
    return None if found == "auto" else found


def _world(out: Path) -> int:
    """The number of processes that the run in `out` was started with, as settings in old words need it.

    Version 0.1 wrote the number of processes and had a device in each; later checkpoints say the number of devices.
    """
    state = _newest_state(out)
    return int(state["info"].get("devices", state["world"])) if state else 1


def _newest_state(out: Path) -> dict[str, Any] | None:
    """The `state.json` of the newest checkpoint that has a sound one."""
    checkpoints = Checkpoints(out / CHECKPOINTS, keep=1, config_hash="")
    for step in reversed(checkpoints.steps()):
        try:
            return parse_state(read(checkpoints.path(step) / STATE, LARGEST_FILE))
        except (OSError, ValueError):
            continue  # said where the checkpoint itself is read
    return None


def _read_config(out: Path) -> dict[str, Any]:
    """The settings in a run's `config.yaml` by dotted name, in the words of the version that began it."""
    read_settings(out / CONFIG)  # refuses what is not settings; what is can be constructed without harm
    return flatten(yaml.safe_load(read(out / CONFIG, LARGEST_FILE)))


def _settings_of(run: OpenRun, config: RunConfig) -> dict[str, Any]:
    """What `config.yaml` is to hold.

    A resumed run keeps its file in the words of the version that began it, and so every checkpoint the hash
    that it was written with; only settings that may change, and about which something was said, are brought up to date.
    """
    settings = asdict(config)
    if not run.checkpoints.steps():
        return settings
    now, kept = flatten(settings), _read_config(run.directory)
    said = {n: value for n, value in now.items() if value is not None and _may_change(n)}
    return _nested({n: said.get(n, v) for n, v in kept.items()})


def _check_same_settings(config: RunConfig) -> None:
    mine = _config_hash(flatten(asdict(config)))
    same = broadcast_bytes(mine.encode()).decode() == mine
    raise_together(
        None
        if same
        else UserError(
            "The processes were started with different settings. Use the same command for all of them."
        )
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"train.seed": 0}` as `{"train": {"seed": 0}}`."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return nested


def _may_change(name: str) -> bool:
    """Whether a setting may be another when a run is resumed."""
    return name in MAY_CHANGE_ON_RESUME or name.split(".")[0] in MAY_CHANGE_ON_RESUME


def _config_hash(flat: Mapping[str, Any]) -> str:
    """Hash of the settings that decide what is computed."""
    fixed = {name: value for name, value in flat.items() if not _may_change(name)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()
