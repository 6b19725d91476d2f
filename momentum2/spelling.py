"""Settings in the words of earlier versions, turned into today's.

A setting that is added later has as its default what versions without it did, so that nothing has to be said here.
"""

from collections.abc import Mapping

from momentum2.errors import UserError

#: Names that are still accepted, and what they are called now.
OLD_NAMES = {"train.virtual_devices": "train.devices"}


def translate(
    given: Mapping[str, object], base: Mapping[str, object], world: int | None
) -> dict[str, object]:
    """Settings by dotted name, in today's words.

    Args:
        given: In any version's words; all of them, or some that override `base`.
        base: What holds where nothing is given, in today's words.
        world: The number of processes that the run was started with; None if it has not been started.
    """
    new = dict(given)
    grouped = new.get("train.devices", base.get("train.devices", "auto")) not in ("auto", 1)
    if "train.virtual_devices" in new:  # it counted the groups of the whole batch, all micro-batches together
        groups = _count("train.virtual_devices", new.pop("train.virtual_devices"))
        accumulate = _count("train.accumulate", new.get("train.accumulate", base.get("train.accumulate", 1)))
        if groups > 1 and groups % accumulate:
            raise UserError(
                f"--train.virtual_devices {groups} cannot be divided among {accumulate} micro-batches; use "
                "--train.devices, the number of devices that share each micro-batch."
            )
        grouped = groups > 1
        new.setdefault("train.devices", groups // accumulate if grouped else world or "auto")
    for name in ("method.student_norm", "method.teacher_norm"):
        if new.get(name) == "split" or (new.get(name) == "batch" and not grouped):
            new[name] = "local"
        elif new.get(name) == "batch" and world in (None, 1):  # over the whole micro-batch of the one process
            new[name] = "synced"
        elif new.get(name) == "batch":
            raise UserError(
                f"--{name} batch with several devices and {world} processes normalized each process's part of the "
                "batch, which is no longer possible; choose local or synced."
            )
    return new


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"--{name} must be a whole number of at least 1, not {value}.")
    return value


def inexact(old: Mapping[str, object], world: int) -> str | None:
    """Why a run of version 0.1 cannot be resumed as it began, in words; None if it can.

    Args:
        old: Its settings in its own words.
        world: The number of processes that wrote its checkpoint.
    """
    name = old.get("method.name")
    if name is None:
        return None  # a detector: all of its norms are synced
    norms = {old.get("method.student_norm")}
    if name in ("byol", "moco"):
        norms.add(old.get("method.teacher_norm"))
    groups, accumulate = (_count(n, old.get(n, 1)) for n in ("train.virtual_devices", "train.accumulate"))
    if "batch" in norms and groups > 1 and world > 1:
        return "its norms of kind batch normalized each process's part of the batch"
    if "momentum" in norms and groups > world * accumulate:
        return "its devices shared one history of batch statistics, and now each has its own"
    if accumulate > 1 and world > 1 and (norms & {"momentum", "synced", "shuffle"} or name == "simclr"):
        return "each process cut its own part of the batch into micro-batches, and now the whole batch is cut"
    if name in ("byol", "moco") and str(old.get("model.backbone")).startswith("efficientnet"):
        return "its teacher dropped random layers, and now it does not"
    return None
