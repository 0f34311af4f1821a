"""The Python interpreter of the engines: SGLang pins different versions than the trainer, so it may have an environment of its own."""

from __future__ import annotations

import sys
from pathlib import Path


def engine_python(configured: Path | None) -> Path:
    """Return `engines.python` if set, else the Python of `.venv-engine` beside this environment if it exists, else this Python."""
    beside = Path(sys.prefix).parent / ".venv-engine" / "bin" / "python"
    return configured or (beside if beside.exists() else Path(sys.executable))
