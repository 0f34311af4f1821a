"""Stand-ins for packages that SGLang imports on CPU but must not call: `triton` and `sgl_kernel`.

Every submodule and every name of such a package exists. Class names are empty classes, because imports subclass them and use them in
isinstance checks; other names are modules, and the package defines the effect of calling them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Call = Callable[..., Any]


class StandIn(ModuleType):
    """A module that has every name; calling the module calls `call(its dotted name, ...)`."""

    def __init__(self, name: str, call: Call, names: Mapping[str, object]) -> None:
        super().__init__(name)
        self._call, self._names = call, names

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        value: Any
        if full in self._names:
            value = self._names[full]
        elif name.startswith("__"):
            raise AttributeError(name)
        elif name[0].isupper():
            value = type(name, (), {"__module__": self.__name__, "__init__": lambda self, *_, **__: None})
        else:
            value = importlib.import_module(full)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.__name__, *args, **kwargs)


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str, call: Call, names: Mapping[str, object]) -> None:
        self._package, self._call, self._names = package, call, names

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._package and not fullname.startswith(f"{self._package}."):
            return None
        return None if self._names.get(fullname, self) is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name, self._call, self._names)

    def exec_module(self, module: ModuleType) -> None:
        pass


def provide(package: str, call: Call, names: Mapping[str, object]) -> None:
    """Make `package` importable unless it is installed.

    Args:
        package: top-level name.
        call: called in place of a name that is not a class, with the dotted name as first argument.
        names: values by dotted name; None: a submodule that must not be found.
    """
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        sys.meta_path.append(_Finder(package, call, names))


def refuse(name: str, *_: Any, **__: Any) -> None:
    """Raise, as the `call` of a package whose functions must not run.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"{name} is a CUDA kernel and there is no CUDA device")


def decorate(_: str, *args: Any, **kwargs: Any) -> Any:
    """Act as a decorator, with or without arguments, that returns the function unchanged."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function
