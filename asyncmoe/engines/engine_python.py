"""The Python interpreter of the engines: SGLang pins different versions than the trainer, so it may have an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asyncmoe.errors import UserError
from asyncmoe.installed import fix

_WANTED = "a Python that has SGLang and asyncmoe"
_ANSWER_S = 60.0
_QUESTION = """
from importlib.util import find_spec
absent = [name for name in ("asyncmoe", "sglang") if find_spec(name) is None]
trouble = "without " + " and ".join(absent) if absent else ""
if not absent:
    try:
        import asyncmoe.reshard
    except ImportError as error:
        trouble = f"which cannot import asyncmoe.reshard ({error})"
print("answer:", trouble)
"""


def engine_python(configured: Path | None) -> Path:
    """Return `engines.python` if set, else the Python of `.venv-engine` beside this environment if it exists, else this Python."""
    beside = Path(sys.prefix).parent / ".venv-engine" / "bin" / "python"
    return configured or (beside if beside.exists() else Path(sys.executable))


def check_engine_python(configured: Path | None) -> Path:
    """Return `engine_python`, after asking it whether it finds what an engine imports first. Takes about a second.

    Raises:
        UserError: it is no Python, does not answer, or lacks SGLang or asyncmoe with its extension.
    """
    python = engine_python(configured)
    command = [str(python), "-c", _QUESTION]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"no answer in {_ANSWER_S:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else error.strerror
        raise UserError("engines.python", got=f"{python}: {why}", expected=_WANTED, hint=f"run: {fix('engine')}") from error
    answers = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("answer:")]
    if done.returncode or not answers:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError("engines.python", got=f"{python}: {said[-1][:200] if said else 'no answer of a Python'}", expected=_WANTED)
    if trouble := answers[-1].removeprefix("answer:").strip():
        raise UserError("engines.python", got=f"{python} {trouble}", expected=_WANTED, hint=_hint(python))
    return python


def _hint(python: Path) -> str:
    ours = Path(__file__).parents[3]
    return f"run: {fix('engine', python=python)}, or write {ours} into a .pth file in its site-packages if only asyncmoe is missing"
