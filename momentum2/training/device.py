"""Where and in which precision a run computes."""

import ctypes
import logging
import os
import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from momentum2.config import Precision
from momentum2.errors import SettingError, shown

log = logging.getLogger("momentum2")


def _has_cuda() -> bool:
    """Whether there is a GPU that can be used; says why one that is there cannot, such as for an old driver."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = torch.cuda.is_available()
    for warning in said:
        log.warning("The GPU is not used (%s).", shown(str(warning.message).rstrip(".")))
    return found


def choose_device(name: str) -> torch.device:
    """`auto`, or a device by name; a process of several gets the accelerator of its local rank."""
    if name == "auto":
        name = "cuda" if _has_cuda() else "mps" if torch.backends.mps.is_available() else "cpu"
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
        # A scheduler may show each process its own GPU alone.
        own = 0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", 0))
        index = device.index if device.index is not None else own
        if index >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise SettingError(
                "train.device",
                f"cannot be cuda:{index}, because this machine has {count} GPU{'s' * (count != 1)}.",
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    return device


def resolve_precision(precision: Precision, device: torch.device) -> Precision:
    """What `auto` stands for on the device; a `SettingError` for what the device cannot do."""
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if precision == "tf32" and not ampere:
        raise SettingError(
            "train.precision", "tf32 needs a GPU of compute capability 8.0 or later. Use fp32."
        )
    if precision == "fp16" and device.type == "mps":
        raise SettingError("train.precision", "fp16 is only for CUDA and CPUs. Use fp32.")
    if precision != "auto":
        return precision
    if device.type == "cuda":
        volta = torch.cuda.get_device_capability(device) >= (7, 0)
        return "bf16" if ampere else "fp16" if volta else "fp32"
    return "fp32"  # on CPUs bf16 is faster or slower, from one kind to the next


def has_bf16_instructions() -> bool:
    """Whether this CPU has instructions for bf16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """What autocast computes in, or None where it is off."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(resolve_precision(precision, device))


@contextmanager
def computing_in(precision: Precision, device: torch.device, cache: bool = True) -> Iterator[None]:
    """A block that computes in the precision.

    Args:
        precision: As in `train.precision`.
        device: Where it computes.
        cache: Keep rounded weights until the block ends; they would be shared with other threads.
    """
    dtype = autocast_dtype(precision, device)
    whole = _WholeKernels() if dtype is not None and device.type == "cpu" else nullcontext()
    with whole, torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=cache):
        yield


class _WholeKernels(TorchFunctionMode):
    """Convolutions in fp32 on maps that are smaller than their kernel or stride.

    In bf16 and fp16 oneDNN leaves parts of the kernel's gradient unset where the stride passes over the whole map (seen
    in torch 2.13): what was in that memory before, NaN too, would be added to the weights.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.conv1d, torch.conv2d, torch.conv3d) and _passes_over(*args, **kwargs):
            args = [x.float() if isinstance(x, Tensor) else x for x in args]
            kwargs = {name: x.float() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _passes_over(
    input: Tensor, weight: Tensor, bias: object = None, stride: Any = 1, *_: object, **__: object
) -> bool:
    """Whether the map of a convolution is smaller than its kernel or stride."""
    kernel = weight.shape[2:]
    strides = (stride,) if isinstance(stride, int) else tuple(stride)
    strides = strides * len(kernel) if len(strides) == 1 else strides
    return any(n < max(k, s) for n, k, s in zip(input.shape[-len(kernel) :], kernel, strides, strict=True))


def choose_algorithms(precision: Precision, deterministic: bool, device: torch.device) -> None:
    """Have CUDA compute as exactly as `precision` says, and by the fastest algorithms or by those that repeat."""
    if device.type != "cuda":
        return
    if precision in ("fp32", "tf32"):
        for switch in _switches():
            switch.fp32_precision = "ieee" if precision == "fp32" else "tf32"
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused
    torch.use_deterministic_algorithms(deterministic)


def _switches() -> list[Any]:
    """torch's switches for the rounding of fp32, in convolutions and in products; none before torch 2.9."""
    owners: list[Any] = [getattr(torch.backends.cudnn, "conv", None), torch.backends.cuda.matmul]
    return [owner for owner in owners if hasattr(owner, "fp32_precision")]


def memory_gb(device: torch.device) -> float:
    """Peak memory so far, of the accelerator where there is one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


@contextmanager
def guest() -> Iterator[None]:
    """Leave the host program's threads, random numbers, current GPU and its algorithms as they were."""
    threads = torch.get_num_threads()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    current = torch.cuda.current_device() if gpus else None
    algorithms = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    rounding = [switch.fp32_precision for switch in _switches()]
    try:
        with torch.random.fork_rng(range(gpus)):  # every step seeds all of them
            yield
    finally:
        torch.set_num_threads(threads)
        if current is not None:
            torch.cuda.set_device(current)
            torch.backends.cudnn.benchmark = algorithms[0]
            torch.use_deterministic_algorithms(algorithms[1])
            for switch, before in zip(_switches(), rounding, strict=True):
                switch.fp32_precision = before


def keep_large_blocks() -> None:
    """Let glibc reuse large blocks: by default it maps and faults every activation over 32 MB again."""
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL("libc.so.6").mallopt
        except (OSError, AttributeError):
            return  # another C library, without that habit
        mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
