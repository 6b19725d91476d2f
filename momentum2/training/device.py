"""Where and in which precision a run computes."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from momentum2.config import Precision
from momentum2.errors import SettingError


def choose_device(name: str) -> torch.device:
    """`auto`, or a device by name; a process of several gets the accelerator of its local rank."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(
            "train.device", f"{name} is not a device. Use auto, cpu, cuda, cuda:1 or mps."
        ) from None
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False):
        raise SettingError("train.device", f"{name} is not available on this machine. Use auto.")
    if device.type == "cuda":
        if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
            raise SettingError("train.device", f"{name} is one GPU for several processes. Use cuda.")
        index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        if index >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise SettingError(
                "train.device",
                f"cannot be cuda:{index}, because this machine has {count} GPU{'s' * (count != 1)}.",
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def use_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether to compute in bf16: as told, or where the device has instructions for it."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and bool(
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def memory_gb(device: torch.device) -> float:
    """Peak memory so far, of the accelerator where there is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


@contextmanager
def guest() -> Iterator[None]:
    """Leave the host program's threads, random numbers and current GPU as they were."""
    threads = torch.get_num_threads()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    current = torch.cuda.current_device() if gpus else None
    try:
        with torch.random.fork_rng(range(gpus)):  # every step seeds all of them
            yield
    finally:
        torch.set_num_threads(threads)
        if current is not None:
            torch.cuda.set_device(current)


def keep_large_blocks() -> None:
    """Let glibc reuse large blocks: by default it maps and faults every activation over 32 MB again."""
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL("libc.so.6").mallopt
        except (OSError, AttributeError):
            return  # another C library, without that habit
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
