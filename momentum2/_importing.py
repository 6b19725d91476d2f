"""`import torchvision` after `import momentum2`, also beside a torch it was not compiled for (see `_torchvision`)."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Patient(Loader):
    """Loads torchvision; where its compiled operators are missing, once more with ours."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            from momentum2 import _torchvision

            _torchvision.declare()
            self._loader.exec_module(module)
            _torchvision.allow()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patient(spec.loader)
        return spec


def install() -> None:
    """Before the finders that are there; costs nothing until torchvision is imported."""
    sys.meta_path.insert(0, _Finder())
