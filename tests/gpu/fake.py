"""A CUDA device that computes nothing and counts everything, for machines without one.

Inside `fake_cuda()` the package runs its real code on tensors that have a shape, a dtype and the device cuda:0, but no
content. Each operation on them is counted, with the bytes that it reads and writes; and, with the line of the package,
each time that a real GPU would be waited for and each copy between the host and the device. What the rules below say is
read in torch's sources and documentation, not measured; `docs/gpu.md` says what that is worth.

A tensor of the device is a subclass over a meta tensor. C++ sees the meta device, so autograd runs; Python sees
cuda:0. Values read by the host are zeros, and True.
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.optim.optimizer
import torch.utils._foreach_utils
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import momentum2

PACKAGE = str(Path(momentum2.__file__).parent)
CUDA, META = torch.device("cuda", 0), torch.device("meta")
aten = torch.ops.aten

#: Kernels that a call launches, where that is not 1. Batch norm's are read in torch's CUDA source, the rest is assumed.
KERNELS = {
    "native_batch_norm": 3,
    "batch_norm_update_stats": 2,
    "convolution_backward": 2,
    "native_batch_norm_backward": 2,
}
#: Operations that read their first input twice: statistics, then normalization.
TWICE = ("native_batch_norm", "native_batch_norm_backward", "_batch_norm_with_update")
#: Operations without work of their own, beside those whose results are views.
FREE = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
}
#: Operations whose result's shape depends on values, for which the host waits.
SHAPED_BY_VALUES = ("nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "bincount")
#: Operations that check their status on the host.
CHECKED = ("_linalg_svd", "linalg_eigh", "_linalg_eigh", "linalg_qr")
#: Operations that autocast computes in its dtype.
LOW = ("conv2d", "linear", "matmul", "__matmul__", "mm", "bmm", "addmm")


class CudaTensor(Tensor):
    """A tensor on the fake device."""

    meta: Tensor
    __torch_function__ = (
        torch._C._disabled_torch_function_impl
    )  # or results would become tensors of this class

    @staticmethod
    def of(meta: Tensor) -> "CudaTensor":
        found = Tensor._make_subclass(CudaTensor, meta, meta.requires_grad, device_for_backend_keys=CUDA)
        found.meta = meta
        return found

    @property
    def device(self) -> torch.device:
        return CUDA

    @property
    def is_cuda(self) -> bool:
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({tuple(self.shape)}, {self.dtype})"


@dataclass
class Count:
    """What was counted."""

    calls: int = 0
    kernels: int = 0
    bytes: int = 0
    received: int = 0  # bytes from other processes
    collectives: int = 0
    pinned: int = 0
    waits: Counter[str] = field(default_factory=Counter)  # by FILE:LINE of the package
    pageable: Counter[str] = field(default_factory=Counter)
    by_name: Counter[str] = field(default_factory=Counter)


class Device:
    """Counts in `now`; `step()` begins a new count and returns the last one."""

    def __init__(self) -> None:
        self.now, self.steps, self.pins = Count(), 0, {}  # type: ignore[var-annotated]
        self.dtypes: dict[str, set[torch.dtype]] = defaultdict(set)

    def step(self) -> Count:
        last, self.now, self.steps = self.now, Count(), self.steps + 1
        return last

    def wait(self) -> None:
        self.now.waits[_line()] += 1

    def copy(self, source: Tensor, target: Tensor | None, non_blocking: bool) -> None:
        """A copy between host and device; `target` is None for a new tensor."""
        host = source if not isinstance(source, CudaTensor) else target
        pinned = host is not None and self.is_pinned(host)
        if not non_blocking or (isinstance(source, CudaTensor) and not pinned):
            self.wait()
        if pinned:
            self.now.pinned += 1
        elif not isinstance(source, CudaTensor):
            self.now.pageable[_line()] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        self.pins[tensor.untyped_storage().data_ptr()] = tensor  # kept, or the address would be used again
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pins


def tree_iter(tree: Any) -> Iterator[Any]:
    """The leaves of lists, tuples and dicts; torch's own does more, and takes most of the time."""
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from tree_iter(item)
    elif isinstance(tree, dict):
        yield from tree_iter(list(tree.values()))
    else:
        yield tree


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return type(tree)([tree_map(function, item) for item in tree])
    if isinstance(tree, dict):
        return {key: tree_map(function, item) for key, item in tree.items()}
    return function(tree)


def _line() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{Path(name).relative_to(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _bytes(tensor: Tensor) -> int:
    held = tensor.untyped_storage().nbytes() if tensor.device.type != "cpu" or tensor.numel() else 0
    size = tensor.numel() * tensor.element_size()
    return min(size, held) if held else size


def _is_cuda(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"  # type: ignore[call-overload]


def _is_named(value: object) -> bool:
    return isinstance(value, torch.device | str) and str(value) in ("cuda", "cuda:0")


class _Operations(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        fakes = [t for t in tensors if isinstance(t, CudaTensor)]
        name = func.overloadpacket.__name__
        if not fakes and not _is_cuda(kwargs.get("device")):
            if kwargs.get("pin_memory"):
                return self.device.pin(func(*args, **{**kwargs, "pin_memory": False}))
            return func(*args, **kwargs)
        if (special := self._between(func, name, args, kwargs)) is not None:
            return special[0]
        host = [t for t in tensors if not isinstance(t, CudaTensor) and t.device.type == "cpu"]
        if name in ("index", "index_put_", "index_put", "_index_put_impl_") and host:
            for index in host:
                self.device.copy(index, None, False)
        elif name == "where" and host:
            for _ in host:
                self.device.wait()
        elif any(t.dim() for t in host):
            raise RuntimeError(f"{func} has tensors of the CPU and of CUDA")
        if name in SHAPED_BY_VALUES or (name == "index" and _has_mask(args[1])):
            self.device.wait()
            raise RuntimeError(f"{func}: its shape depends on values")
        if (
            name in CHECKED
            or (name == "_index_put_impl_" and _has_mask(args[1]))
            or (name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) == 1)
        ):
            self.device.wait()
        outputs = self._run(func, name, args, kwargs)
        self._count(func, name, args, fakes, outputs)
        return outputs

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The operation on the shapes; what it changes in place is given back as the tensor that it is."""
        if "device" in kwargs:
            kwargs = {
                **kwargs,
                "device": META
                if _is_cuda(kwargs["device"]) or kwargs["device"] is None
                else kwargs["device"],
            }
        kwargs.pop("pin_memory", None)

        def unwrap(t: Any) -> Any:
            if isinstance(t, CudaTensor):
                return t.meta
            return t.to(META) if isinstance(t, Tensor) and t.dim() else t

        metas, options = tree_map(unwrap, (args, kwargs))
        owner = {id(t.meta): t for t in tree_iter((args, kwargs)) if isinstance(t, CudaTensor)}
        found = SHAPES.get(name, func)(*metas, **options)

        def wrap(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            return owner[id(t)] if id(t) in owner else CudaTensor.of(t)

        return tree_map(wrap, found)

    def _between(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[Any] | None:
        """What moves between host and device, as a tuple of the result."""
        device = self.device
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            device.wait()
            return (args[0].dtype == torch.bool or name != "_local_scalar_dense" or 0,)
        if name == "_to_copy":
            source, target = args[0], kwargs.get("device")
            if isinstance(source, CudaTensor) and target is not None and torch.device(target).type == "cpu":
                device.copy(source, None, bool(kwargs.get("non_blocking")))
                return (_values(source, kwargs.get("dtype") or source.dtype),)
            if not isinstance(source, CudaTensor):
                device.copy(source, None, bool(kwargs.get("non_blocking")))
                rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")}
                return (CudaTensor.of(aten._to_copy(source.detach(), device=META, **rest)),)
        if name in ("copy_", "copy"):
            target, source = args[0], args[1]
            if isinstance(target, CudaTensor) != isinstance(source, CudaTensor):
                if not isinstance(source, CudaTensor) and source.dim() == 0:
                    return None  # a number, passed as an argument of the kernel
                device.copy(
                    source, target, bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
                )
                if not isinstance(target, CudaTensor):
                    target.copy_(_values(source, source.dtype))
                return (target,)
        return None

    def _count(self, func: Any, name: str, args: Any, fakes: list[CudaTensor], outputs: Any) -> None:
        schema = func._schema
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if view or name in FREE or not (fakes or any(True for _ in tree_iter(outputs))):
            return
        made = {id(t): t for t in tree_iter(outputs) if isinstance(t, CudaTensor)}
        if schema.is_mutable:
            made |= {
                id(t): t
                for argument, given in zip(schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
                for t in tree_iter(given)
                if isinstance(t, CudaTensor)
            }
        count = self.device.now
        count.calls += 1
        kernels = KERNELS.get(name, 1)
        if name.startswith("_foreach"):
            kernels = _foreach_launches(args)
        count.kernels += kernels
        # Batch norm reads its input for the statistics and again to normalize; in evaluation mode once.
        twice = name in TWICE and (name != "native_batch_norm" or args[5])
        read = sum(map(_bytes, fakes)) + (_bytes(args[0]) if twice else 0)
        if name in ("zero_", "fill_", "_foreach_zero_"):
            read = 0
        count.bytes += read + sum(map(_bytes, made.values()))
        count.by_name[name] += 1
        if name == "convolution":
            self.device.dtypes[name].add(args[0].dtype)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in tree_iter(indices))


def _values(source: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full(source.shape, dtype == torch.bool, dtype=dtype)


def _foreach_launches(args: Any) -> int:
    """By torch's limits: tensors and blocks of 65,536 numbers in one launch."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    limit = {1: 110, 2: 64, 3: 48, 4: 36}.get(len(lists), 30)
    blocks = sum(math.ceil(t.numel() / 65536) for t in lists[0])
    return max(math.ceil(len(lists[0]) / limit), math.ceil(blocks / 320))


def _statistics(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return tuple(torch.empty(x.shape[1], dtype=dtype, device=META) for _ in range(2))  # type: ignore[return-value]


def _reduced(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *_: bool) -> tuple[Any, ...]:
    return tuple(torch.empty_like(mean) for _ in range(4 if weight is not None else 2)) + (
        (None, None) if weight is None else ()
    )


#: Results of operations without a meta kernel.
SHAPES: dict[str, Callable[..., Any]] = {
    "batch_norm_update_stats": _statistics,
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": lambda x, mean, *_: (
        torch.empty_like(mean[0]),
        torch.empty_like(mean[0]),
    ),
    "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
    "batch_norm_backward_reduce": _reduced,
    "batch_norm_backward_elemt": lambda g, x, *_: torch.empty_like(x),
}


class _Functions(TorchFunctionMode):
    """What must be seen before C++ does: autocast, which asks C++ for the device, and copies that are none."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.cache = device, {}  # type: ignore[var-annotated]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        # C++ would ask CUDA for the number of a device without one.
        args = tuple(CUDA if _is_named(a) else a for a in args)
        kwargs = {k: CUDA if k == "device" and _is_named(v) else v for k, v in kwargs.items()}
        if name == "tolist" and isinstance(args[0], CudaTensor):
            self.device.wait()
            return _values(args[0], args[0].dtype).tolist()
        if name == "to" and isinstance(args[0], CudaTensor):
            rest = [a for a in args[1:] if not (isinstance(a, torch.device | str) and _is_cuda(a))]
            if _is_cuda(kwargs.get("device")):
                kwargs.pop("device")
            args = (args[0], *rest)
            if not rest and not {"dtype", "memory_format", "copy"} & kwargs.keys():
                return args[0]
        if name == "cuda" and args and isinstance(args[0], CudaTensor):
            return args[0]
        if func is torch.tensor and _is_cuda(kwargs.get("device")):
            kwargs.pop("device")
            return func(*args, **kwargs).to(CUDA)
        if name in LOW and torch.is_autocast_enabled("cuda"):
            args, kwargs = tree_map(self._low, (args, kwargs))
        return func(*args, **kwargs)

    def _low(self, t: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        if not isinstance(t, CudaTensor) or t.dtype != torch.float32:
            return t
        if not (t.requires_grad and t.is_leaf and torch.is_autocast_cache_enabled()):
            return t.to(dtype)
        if id(t) not in self.cache:
            self.cache[id(t)] = (t, t.to(dtype))
        return self.cache[id(t)][1]


class _Event:
    """Waiting for one drains the queue, unless something did since it was recorded or a step has passed."""

    device: Device

    def __init__(self, *_: object, **__: object) -> None:
        self.recorded: tuple[int, int] | None = None

    def record(self, stream: object = None) -> None:
        self.recorded = self._now()

    def synchronize(self) -> None:
        if self.recorded == self._now():
            self.device.wait()

    def query(self) -> bool:
        return self.recorded != self._now()

    def _now(self) -> tuple[int, int]:
        return self.device.steps, sum(self.device.now.waits.values())


class _Collectives:
    """Stand-ins that move nothing: what other processes have is as large as what this one has."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def _count(self, *received: Tensor) -> Any:
        for tensor in received:
            assert tensor.is_contiguous()
        self.device.now.collectives += 1
        self.device.now.received += sum(t.numel() * t.element_size() for t in received)
        return _Done()

    def all_reduce(self, tensor: Tensor, *_: object, **__: object) -> Any:
        return self._count(tensor)

    def broadcast(self, tensor: Tensor, *_: object, **__: object) -> Any:
        return self._count(tensor)

    def all_gather(self, parts: list[Tensor], tensor: Tensor, *_: object, **__: object) -> Any:
        assert tensor.is_contiguous()
        return self._count(*parts)

    def all_gather_into_tensor(self, output: Tensor, tensor: Tensor, *_: object, **__: object) -> Any:
        assert tensor.is_contiguous()
        return self._count(output)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, *_: object, **__: object) -> Any:
        assert tensor.is_contiguous()
        return self._count(output)

    def gather(self, tensor: Tensor, parts: list[Tensor] | None = None, *_: object, **__: object) -> Any:
        for part in parts or ():
            part.copy_(tensor)
        return self._count(*(parts or ()))

    def barrier(self, *_: object, **__: object) -> None:
        self._count()


class _Done:
    def wait(self) -> None:
        pass


class _Replicated(nn.Module):
    """In place of DistributedDataParallel, whose work is C++ and is not counted."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


@contextmanager
def fake_cuda(world: int = 1, rank: int = 0, capability: tuple[int, int] = (8, 0)) -> Iterator[Device]:
    """A machine with a GPU in this process, which is one of `world`."""
    device = Device()
    functions = _Functions(device)
    group = torch._C._group_tensors_by_device_and_dtype
    event = type("Event", (_Event,), {"device": device})

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {(CUDA if d == META else d, t): v for (d, t), v in group(*args, **kwargs).items()}

    with ExitStack() as stack:
        for owner, name, new in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "set_device", lambda _: None),
            (torch.cuda, "is_bf16_supported", lambda including_emulation=True: capability >= (8, 0)),
            (torch.cuda, "get_device_capability", lambda _=None: capability),
            (torch.cuda, "max_memory_allocated", lambda _=None: 0),
            (torch.cuda, "manual_seed_all", lambda _: None),
            (torch.cuda, "synchronize", lambda *_: device.wait()),
            (torch.cuda, "Event", event),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch, "clear_autocast_cache", functions.cache.clear),
            (
                torch.Tensor,
                "pin_memory",
                lambda tensor: device.pin(tensor.clone()),
            ),  # in the loader's thread too
            (torch.Tensor, "is_pinned", device.is_pinned),
            (torch._C, "_group_tensors_by_device_and_dtype", grouped),
        ):
            stack.enter_context(patch.object(owner, name, new))
        for module in (torch.utils._foreach_utils, sys.modules["torch.optim.optimizer"]):
            types = module._foreach_supported_types
            types.append(CudaTensor)
            stack.callback(types.remove, CudaTensor)
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrite)
        if world > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            stack.callback(dist.destroy_process_group)
            stand_ins = _Collectives(device)
            for name in dir(stand_ins):
                if not name.startswith("_") and name != "device":
                    stack.enter_context(patch.object(dist, name, getattr(stand_ins, name)))
            stack.enter_context(patch("momentum2.distributed.data_parallel", _Replicated))
            stack.enter_context(
                patch("momentum2.distributed.together.group_device", lambda: torch.device("cpu"))
            )
        stack.enter_context(_Operations(device))
        stack.enter_context(functions)
        yield device
