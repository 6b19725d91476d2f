"""What a bug report needs to say about a machine. No name of a person, a machine or a folder is in it."""

import importlib.metadata
import io
import platform
import re
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from momentum2 import __version__
from momentum2.data.images import Encoded
from momentum2.errors import shown
from momentum2.machine import allowed_cores, free_cores, memory
from momentum2.training.device import choose_device, resolve_precision

_DECODING = 0.5  # seconds in which images are decoded
_SIDES = 500, 375  # the usual size of a photo in ImageNet


def examine(folder: Path) -> list[tuple[str, str]]:
    """(what, value) lines: versions, devices, cores, memory, free disk at `folder`, and how fast images are decoded."""
    required, extras = _requirements()
    device = choose_device("auto")
    lines = [
        ("momentum2", __version__),
        ("Python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("processor", _processor()),
        *((name, _version(name)) for name in required),
        ("operators", _operators()),
        *((f"[{extra}]", _versions(names, extra)) for extra, names in extras.items()),
        ("devices", _devices()),
        ("auto", f"{device.type}, {resolve_precision('auto', device)}"),
        (
            "cores",
            f"{allowed_cores()} allowed, {free_cores()} free now; torch uses {torch.get_num_threads()}",
        ),
        ("memory", f"{memory() / 1e9:.1f} GB"),
        ("disk", f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free here"),
        ("decoding", f"{_decoding():,.0f} JPEG images of {_SIDES[0]}×{_SIDES[1]} a second on one core"),
    ]
    return [(name, shown(value)) for name, value in lines]


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """The packages that this one needs, and those of each extra, as its own metadata has them."""
    try:
        found = importlib.metadata.requires("momentum2") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        found = ["torch", "torchvision", "numpy", "pillow"]
    required, extras = list[str](), defaultdict[str, list[str]](list)
    for line in found:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name is None or (extra is not None and extra[1] in ("dev", "benchmark")):
            continue
        (required if extra is None else extras[extra[1]]).append(name[0])
    return required, extras


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions(names: list[str], extra: str) -> str:
    found = {name: _version(name) for name in names}
    told = ", ".join(f"{name} {version}" for name, version in found.items())
    missing = "not installed" in found.values()
    return f"{told} (pip install 'momentum2[{extra}]')" if missing else told


def _operators() -> str:
    """Whether torchvision's compiled operators load beside this torch."""
    from momentum2._torchvision import torchvision

    own = (
        "momentum2" in getattr(torchvision.ops.nms, "__module__", "") or not torchvision.extension._has_ops()
    )
    return "momentum2's own, because torchvision's do not load with this torch" if own else "torchvision's"


def _processor() -> str:
    if sys.platform == "linux":
        try:
            with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
                found = re.search(r"^model name\s*:\s*(.+)$", file.read(1 << 16), re.MULTILINE)
            if found:
                return found[1]
        except OSError:
            pass  # then as Python knows it
    return platform.processor() or "unknown"


def _devices() -> str:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    names += ["Apple GPU (mps)"] if torch.backends.mps.is_available() else []
    built = torch.version.cuda or torch.version.hip
    return ", ".join(names) or f"no GPU (torch built for {f'CUDA {built}' if built else 'CPUs'})"


def _decoding() -> float:
    """Images a second, of one that has something to decode everywhere, as training decodes them."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(_SIDES, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    count, start = 0, time.process_time()
    while (spent := time.process_time() - start) < _DECODING:
        Encoded(file.getvalue()).pixels()
        count += 1
    return count / spent
