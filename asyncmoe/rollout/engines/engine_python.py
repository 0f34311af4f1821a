"""Which Python engines are started with: SGLang pins other versions than the trainer wants, so it may have an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncmoe.errors import UserError


def engine_python(configured: Path | None) -> Path:
    """`engines.python` where it is given, else that of `.venv-engine` beside this environment where there is one, else this Python.

    Raises:
        UserError: there is none at that place.
    """
    beside = Path(sys.prefix).parent / ".venv-engine" / "bin" / "python"
    python = configured or (beside if beside.exists() else Path(sys.executable))
    if not python.exists():
        raise UserError("engines.python", got=python, expected="a Python that has SGLang", cure="run: make setup")
    return python
