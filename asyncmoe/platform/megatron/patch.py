"""Replacing one attribute of someone else's module, loudly when it is not there."""

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


def version() -> str:
    """Version of megatron-core, or "none"."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def require_megatron(compile: bool) -> None:
    """Import megatron-core.

    It decorates small functions (the router's among them) with `torch.compile`, bound once as `megatron.core.jit.jit_fuser`. On a
    processor that would compile C++ in the middle of the first step; without `compile` the decorator does nothing.

    Raises:
        ConfigError: it is not installed.
        InvariantBroken: it was imported before.
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
        raise ConfigError("megatron-core", got=str(error), expected=SUPPORTED, cure="pip install 'asyncmoe[train]'") from error
    finally:
        torch.compile = original


def _eager(function: Any = None, **_: object) -> Any:
    return function if function is not None else _eager


def module(name: str) -> ModuleType:
    """The module `megatron.core.<name>`.

    Raises:
        ConfigError: this version has none.
    """
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ModuleNotFoundError as error:
        raise gone(f"megatron.core.{name}") from error


def replace(owner: Any, name: str, value: Any) -> None:
    """Set `owner.name`, which must exist.

    Raises:
        ConfigError: it does not.
    """
    if not hasattr(owner, name):
        raise gone(f"{getattr(owner, '__name__', owner)}.{name}")
    setattr(owner, name, value)


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set `owner.name` to `make(what it was)`.

    Raises:
        ConfigError: it does not exist.
    """
    replace(owner, name, make(getattr(owner, name, None)))


def gone(what: str, everywhere: bool = False) -> ConfigError:
    """The error for a patch whose target is missing.

    Args:
        everywhere: a machine with CUDA and Transformer Engine has the patch too.
    """
    return ConfigError(
        "megatron-core",
        got=f"version {version()} without {what}",
        expected=f"{SUPPORTED}, whose {what} asyncmoe replaces on this machine",
        cure="install a supported version" + ("" if everywhere else ", or run with CUDA and Transformer Engine"),
    )
