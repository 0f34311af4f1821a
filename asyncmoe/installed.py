"""Find out how asyncmoe was installed, which extras are present, and how to install missing ones.

Imports only the standard library: it must work when everything else is missing.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from asyncmoe.errors import UserError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "cli": ("typer", "rich", "pydantic", "pydantic_core", "yaml", "msgspec", "packaging", "zmq"),
    "train": (
        *("torch", "megatron", "transformers", "jinja2", "tokenizers", "safetensors"),
        *("aiohttp", "mpmath", "huggingface_hub", "prometheus_client", "psutil", "fsspec", "tenacity"),
        "uvloop",
    ),
    "report": ("plotly",),
    "tensorboard": ("tensorboard",),
    "engine": ("sglang",),
    "ray": ("ray",),
    "datasets": ("datasets",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
    "verifiers": ("verifiers",),
    "redis": ("redis",),
    "mcp": ("mcp", "mcp_types", "httpx2", "anyio"),
}
"""Modules that asyncmoe imports, by the extra of pyproject.toml that provides them."""
_OF_SETUP = ("cli", "train", "report", "tensorboard", "ray", "redis", "engine")
"""The extras that `make setup` of a checkout installs."""
_LIGHT = ("plan", "simulate", "doctor", "config")
_ABOVE = Path(__file__).parents[1]


def from_checkout() -> bool:
    """Return whether this package lies in a checkout, set up by `make setup`; otherwise pip installed it."""
    return all((_ABOVE / name).is_file() for name in ("Makefile", "pyproject.toml"))


def has(module: str) -> bool:
    """Return whether a top-level module can be found, without importing it."""
    return find_spec(module) is not None


def fix(extra: str = "train", *, gpu: bool = False, python: Path | str | None = None) -> str:
    """Return the command that installs what is missing.

    Args:
        extra: the extra that provides it, for pip.
        gpu: builds for GPUs are missing.
        python: the interpreter that lacks it; None: this one.
    """
    if from_checkout() and extra in _OF_SETUP:
        return "make setup GPU=1" if gpu else "make setup"
    wanted = _declared(extra) if from_checkout() else [f"asyncmoe[{extra}]"]
    return " ".join([f"{python or sys.executable} -m pip install", *(f'"{one}"' for one in wanted)])


def _declared(extra: str) -> list[str]:
    """Return the requirements of an extra, as the checkout declares them; `asyncmoe[extra]` would name the asyncmoe of a registry."""
    project = tomllib.loads((_ABOVE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: list[str] = project["optional-dependencies"][extra]
    return found


def rebuild(*, gpu: bool = False, archs: str = "") -> str:
    """Return how to rebuild the extensions.

    Args:
        gpu: with CUDA kernels.
        archs: the architectures of the kernels, as ASYNCMOE_CUDA_ARCHS; "": those of a usual build.
    """
    variables = f'ASYNCMOE_CUDA_ARCHS="{archs}" ' if archs else ""
    if from_checkout():
        return f"build it again: rm -f .venv/.built*; {variables}make setup{' GPU=1' if gpu else ''}"
    kernels = "ASYNCMOE_CUDA=1 " if gpu else ""
    return f"build it again: {variables}{kernels}{sys.executable} -m pip install --force-reinstall --no-deps --no-binary asyncmoe asyncmoe"


def rebuild_with_kernels() -> str:
    """Return how to rebuild the extensions with their CUDA kernels."""
    return f"{rebuild(gpu=True)}, which {'installs nvcc' if from_checkout() else 'needs nvcc'} and fails without the kernels"


def need(module: str, what: str) -> None:
    """Refuse to begin `what` without a module.

    Raises:
        UserError: the module is not installed; names the extra that provides it.
    """
    if not has(module):
        raise absent(module, what)


def absent(module: str, what: str) -> UserError:
    """Return the error for something that needs a module of `EXTRAS`."""
    extra = next(name for name, modules in EXTRAS.items() if module in modules)
    if extra == "cli" and what.split()[-1] not in _LIGHT:
        extra = "train"
    return UserError(what, got=f"no module {module}", expected=f"the extra {extra}", hint=f"run: {fix(extra)}")


def explained(error: ModuleNotFoundError) -> UserError | None:
    """Return this command's error for an import that failed because an extra or a compiled extension is missing; None for other modules."""
    name, command = error.name or "", next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if name in ("asyncmoe.reshard._C", "asyncmoe.trajectory._C"):
        hint = "run: make setup" if from_checkout() else "install a wheel of asyncmoe that was built for this Python"
        return UserError(name, got="no compiled extension", expected="one in the package", hint=hint)
    module = name.split(".")[0]
    known = any(module in modules for modules in EXTRAS.values())
    return absent(module, f"asyncmoe {command}".rstrip()) if known and not has(module) else None
