"""Patches SGLang's modules when they are imported, because most servers import only some of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class PatchTargetGone(RuntimeError):
    """The installed SGLang differs from the release that the CPU patches were written for."""


def after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch` once with the module `name`, after its import.

    Raises:
        PatchTargetGone: the module was already imported.
    """
    if name in sys.modules:
        raise PatchTargetGone(f"{name} was imported before it could be patched")
    sys.meta_path.insert(0, _After(name, patch))


def install(*modules: ModuleType) -> None:
    """Apply the `PATCHES` of modules of this package, functions by the name of the module that they change. Call it in every process before
    the import of SGLang. Raises as `after_import`."""
    for module in modules:
        for name, patch in module.PATCHES.items():
            after_import(name, patch)


class _After(MetaPathFinder):
    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
