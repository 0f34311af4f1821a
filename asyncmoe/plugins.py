"""Load a user's own code by its name, `package.module:name`: scorers, tools, environments, agents, parts of the objective, model families.

Every process that needs a name imports it: from the working directory first, then from `PYTHONPATH` and the installed packages.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from asyncmoe.errors import ConfigError, UserError

FORM = "package.module:name"
_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_name(text: str) -> bool:
    """Return whether a text has the form `package.module:name`."""
    return _NAME.fullmatch(text) is not None


def load(target: str, key: str, *, forms: str, wanted: str) -> Any:
    """Import `package.module:name` and return the object of that name.

    Args:
        key: the configuration key that names it, for messages.
        forms: the values that the key accepts.
        wanted: the expected object, for example "a function that can be imported".

    Raises:
        ConfigError: the target is not of this form, or cannot be imported.
        UserError: raised by the module itself.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise ConfigError(key, got=repr(target), expected=forms)
    try:
        return getattr(importlib.import_module(module), name)
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(key, got=f"{target}: {told(error)}", expected=wanted) from error


def load_function(target: str, key: str, *, forms: str) -> Callable[..., object]:
    """Load a function or another object that can be called. Raises as `load`, and if it cannot be called."""
    function = load(target, key, forms=forms, wanted="a function that can be imported")
    if not callable(function):
        raise ConfigError(key, got=f"{target}, a {type(function).__name__}", expected="a function")
    return cast(Callable[..., object], function)


def told(error: BaseException) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"


def place(found: Callable[..., object]) -> str:
    """Return where a function is defined, as "FILE:LINE"; "no source file" if it is not written in Python."""
    code = getattr(inspect.unwrap(found), "__code__", None)
    return "no source file" if code is None else f"{_short(code.co_filename)}:{code.co_firstlineno}"


def raised_at(error: BaseException) -> str:
    """Return the line that raised an exception, as "FILE:LINE"."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{_short(last.filename)}:{last.lineno}"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def takes(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False  # built in, without a signature


def source_digest(target: str) -> str:
    """Return the SHA-256 in hex of the file of a loaded target's module; "" if it has no file."""
    file = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
