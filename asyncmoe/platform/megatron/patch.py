"""Replace an attribute of Megatron or torch, and fail if it does not exist."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from asyncmoe.errors import ConfigError, InvariantBroken

SUPPORTED = "0.16.1 to 0.19.2"


def require_megatron(compile: bool) -> None:
    """Import megatron-core, with or without `torch.compile` of its small functions.

    Megatron decorates small functions, among them the router's, with `torch.compile`, bound once as `megatron.core.jit.jit_fuser`. On a
    CPU this would compile C++ during the first step, so without `compile` the decorator does nothing.

    Raises:
        ConfigError: megatron-core is not installed.
        InvariantBroken: megatron-core was already imported.
    """
    if "megatron.core" in sys.modules:
        raise InvariantBroken("megatron.core was imported before asyncmoe.platform.megatron.prepare()")
    original = torch.compile
    if not compile:
        torch.compile = _eager  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.transformer.moe.router")
    except ModuleNotFoundError as error:
        raise ConfigError("megatron-core", got=str(error), expected=SUPPORTED, hint="pip install 'asyncmoe[train]'") from error
    finally:
        torch.compile = original


def _eager(function: Any = None, **_: object) -> Any:
    return function if function is not None else _eager


def module(name: str) -> ModuleType:
    """Import and return the module `megatron.core.<name>`.

    Raises:
        ConfigError: this version has no such module.
    """
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ModuleNotFoundError as error:
        raise gone(f"megatron.core.{name}") from error


def replace(owner: Any, name: str, value: Any) -> None:
    """Replace the existing attribute `owner.name`.

    Raises:
        ConfigError: the attribute does not exist.
    """
    if not hasattr(owner, name):
        raise gone(f"{getattr(owner, '__name__', owner)}.{name}")
    setattr(owner, name, value)


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace the existing attribute `owner.name` by `make(original)`.

    Raises:
        ConfigError: the attribute does not exist.
    """
    replace(owner, name, make(getattr(owner, name, None)))


def gone(what: str) -> ConfigError:
    """Return the error for a patch whose target is missing."""
    return ConfigError(
        "megatron-core",
        got=f"version {importlib.metadata.version('megatron-core')} without {what}",
        expected=f"{SUPPORTED}, whose {what} asyncmoe replaces on this machine",
        hint="install a supported version",
    )
