"""The tensors of a run, by the names that they have in its checkpoints."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from momentum2 import distributed
from momentum2.errors import UserError
from momentum2.norms import MomentumBatchNorm
from momentum2.runs.checkpoint import Checkpoint, Checkpoints, Damaged, parse_tensors, read_files
from momentum2.runs.names import CHECKPOINTS


def collect(
    method: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a run by name: those of process 0 that count for all, and a row for each device here.

    Histories of batch statistics, and what alpha is chosen from, are the devices' own. All else is equal on all
    processes, or counts as process 0 has it: the running statistics of the other norms are device 0's.
    """
    shared = {f"method/{name}": tensor for name, tensor in method.state_dict().items()}
    for name, parameter in method.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # such as the momentum of plain SGD, which has none
                shared[f"optimizer/{name}/{key}"] = value
    devices: dict[str, Tensor] = {}
    for name, norm in _with_history(method):
        devices |= {f"method/{name}.{key}": rows for key, rows in _rows(norm).items()}
    return shared, devices


def _rows(norm: MomentumBatchNorm) -> dict[str, Tensor]:
    """What a norm has a row of for each device here."""
    mean, var = norm.histories()
    return {"running_mean": mean, "running_var": var, **norm.auto_state()}


def _with_history(method: nn.Module) -> Iterator[tuple[str, MomentumBatchNorm]]:
    return ((name, m) for name, m in method.named_modules() if isinstance(m, MomentumBatchNorm))


def read_alphas(run: Path) -> tuple[int, dict[str, Tensor]]:
    """The step of a run's last checkpoint, and the alpha of each norm that chooses it: (D,) by the norm's name."""
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1, config_hash="")
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run} has no checkpoint yet.")
    path = checkpoints.path(steps[-1])
    try:
        _, devices = parse_tensors(read_files(path))
    except Damaged as damage:
        raise UserError(f"{path} is corrupt ({damage}). Choose another run.") from None
    ending = ".alpha"
    return steps[-1], {
        name.removeprefix("method/").removesuffix(ending): rows.flatten()
        for name, rows in devices.items()
        if name.endswith(ending)
    }


def restore(method: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Put a checkpoint back, strictly by name."""
    saved = checkpoint.shared
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
            if key == "step" and isinstance(optimizer, torch.optim.AdamW):
                optimizer.state[parameter][key] = tensor  # on the CPU, or a GPU would wait when it is read
                continue
            if tensor.shape == parameter.shape:  # in the parameter's memory layout: sums keep their order
                tensor = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
            optimizer.state[parameter][key] = tensor.to(parameter.device)
    rows: list[tuple[MomentumBatchNorm, dict[str, Tensor]]] = []
    count = distributed.world_size()
    for name, norm in _with_history(method):
        if f"method/{name}.alpha" in checkpoint.devices:
            norm.alpha = "auto"
        mine = _rows(norm)
        keys = [key for key in mine if f"method/{name}.{key}" in checkpoint.devices]
        found = {key: checkpoint.devices[f"method/{name}.{key}"] for key in keys}
        wanted = {key: (count * norm.devices, *tensor.shape[1:]) for key, tensor in mine.items()}
        if {key: tuple(tensor.shape) for key, tensor in found.items()} != wanted:
            differing.append(f"{name} has no histories of {count * norm.devices} devices")
            continue
        first = norm.devices * distributed.rank()
        rows.append((norm, {key: tensor[first : first + norm.devices] for key, tensor in found.items()}))
    if differing:
        shown = ", ".join(differing[:5]) + (f" and {len(differing) - 5} more" if len(differing) > 5 else "")
        raise UserError(f"The checkpoint at step {checkpoint.step} does not match this network: {shown}.")
    method.load_state_dict(state)
    for norm, found in rows:
        norm.set_histories(found["running_mean"], found["running_var"])
        if norm.auto:
            norm.set_auto_state(found)


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
