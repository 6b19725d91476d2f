"""Settings in the words of earlier versions, turned into today's.

A setting that is added later has as its default what versions without it did, so that nothing has to be said here.
"""

import os
from collections.abc import Iterator, Mapping

from momentum2.errors import SettingError

#: Names that were renamed, and nothing else.
_RENAMED = {"views.colour": "views.color"}
#: The same for options of commands.
OLD_OPTIONS = {"licence": "license"}
#: Both views in one call of a network: only in development versions before 0.2.
_GONE = "method.joint_views"
_NORMS = ("method.student_norm", "method.teacher_norm")


def old_words(given: Mapping[str, object]) -> Iterator[str]:
    """A sentence for each given setting that has another name or value today."""
    for old, new in _RENAMED.items():
        if old in given:
            yield f"{old} is now {new}."
    if _GONE in given:
        yield f"{_GONE} no longer exists: each view has its own call, and its own CPU thread."
    if "train.virtual_devices" in given:
        yield (
            "train.virtual_devices is now train.devices, the number of devices that share each micro-batch: "
            "virtual_devices / accumulate."
        )
    for name in _NORMS:
        if given.get(name) in ("batch", "split"):
            yield f"{name} {given[name]} is now called local (batch with several devices: synced)."


def translate(
    given: Mapping[str, object], base: Mapping[str, object], world: int | None
) -> dict[str, object]:
    """Settings by dotted name, in today's words.

    Args:
        given: In any version's words; all of them, or some that override `base`.
        base: What holds where nothing is given, in today's words.
        world: The number of processes that a run of these settings was started with; None if none was.
    """
    new = {name: value for name, value in given.items() if name not in (*_RENAMED, _GONE)}
    for old, name in _RENAMED.items():
        if old in given:
            new.setdefault(name, given[old])
    grouped = new.get("train.devices", base.get("train.devices", "auto")) not in ("auto", 1, "1")
    if "train.virtual_devices" in new:  # it counted the groups of the whole batch, all micro-batches together
        groups = _count("train.virtual_devices", new.pop("train.virtual_devices"))
        accumulate = _count("train.accumulate", new.get("train.accumulate", base.get("train.accumulate", 1)))
        if groups > 1 and groups % accumulate:
            raise SettingError(
                "train.virtual_devices",
                f"{groups} cannot be divided among {accumulate} micro-batches. Use train.devices, the number of "
                "devices that share each micro-batch.",
            )
        grouped = groups > 1
        new.setdefault("train.devices", groups // accumulate if grouped else world or "auto")
    for name in _NORMS:
        if new.get(name) == "batch" and grouped:
            if world is None and os.environ.get("WORLD_SIZE", "1") != "1":
                raise SettingError(
                    name,
                    "batch with several devices and processes is no longer possible. Use local or synced.",
                )
            # Over the whole micro-batch of one process; of several, over the part of each, which nothing is today.
            new[name] = "synced" if world in (None, 1) else "local"
        elif new.get(name) in ("batch", "split"):
            new[name] = "local"
    teacherless = new.get("method.name") in ("simsiam", "simclr", "supervised")
    if teacherless and new.get("method.reference_batch") in (256, "256"):
        del new["method.reference_batch"]  # the default of version 0.1, which decides nothing there
    return new


def _count(name: str, value: object) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SettingError(name, f"must be a whole number of at least 1, not {value!r}.")
    return value


def inexact(old: Mapping[str, object], world: int, first: bool) -> str | None:
    """Why a run of an earlier version cannot be resumed exactly, in words; None if it can.

    Args:
        old: Its settings in its own words.
        world: The number of processes that wrote its checkpoint.
        first: Whether version 0.1 wrote it.
    """
    name = old.get("method.name")
    if name is None:
        old_detector = "model" in old and "warmup_steps" not in old
        return "its detector had different heads and learned from different targets" if old_detector else None
    if old.get(_GONE) in (True, "true"):
        return "its views shared their batch statistics, and now each has its own"
    if not first:
        return None
    norms = {old.get("method.student_norm")}
    if name in ("byol", "moco"):
        norms.add(old.get("method.teacher_norm"))
    groups, accumulate = (_count(n, old.get(n, 1)) for n in ("train.virtual_devices", "train.accumulate"))
    if "batch" in norms and groups > 1 and world > 1:
        return "its norms of kind batch normalized each process's part of the batch"
    if "momentum" in norms and groups > world * accumulate:
        return "its devices shared one history of batch statistics, and now each has its own"
    if accumulate > 1 and world > 1 and (norms & {"momentum", "synced", "shuffle"} or name == "simclr"):
        return "each process divided its own part of the batch into micro-batches, and now the whole batch is divided"
    if name == "simclr":
        return "its projector had different layers"
    if name in ("byol", "moco") and str(old.get("model.backbone")).startswith("efficientnet"):
        return "its teacher dropped random layers, and now it does not"
    return None
