"""The keeper of a run's engines on this machine: `python -m asyncmoe.launch.keep CONFIG LAUNCHER`, with the launcher's process id."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncmoe.launch import part

if __name__ == "__main__":
    part.main(lambda: part.keeper(Path(sys.argv[1]), int(sys.argv[2])))
