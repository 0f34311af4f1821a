"""A rollout worker of a run: `python -m asyncmoe.launch.work CONFIG NUMBER`."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncmoe.launch import part

if __name__ == "__main__":
    part.main(lambda: part.worker(Path(sys.argv[1]), int(sys.argv[2])))
