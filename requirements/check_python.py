"""Fails with one line if Python, venv or the C++ compiler is missing or too old; runs before anything is installed."""

import shutil
import sys

if sys.version_info < (3, 11):  # noqa: UP036  the machine's Python may be older
    sys.exit(f"Python: got {sys.version.split()[0]}, expected 3.11 or newer; run: make PYTHON=python3.11 demo")
try:
    import ensurepip  # noqa: F401
except ImportError:
    sys.exit("Python's venv module: got none, expected ensurepip; run: apt-get install python3-venv python3-dev")
if shutil.which("g++") is None:
    sys.exit("C++ compiler: got none, expected g++; run: apt-get install g++")
