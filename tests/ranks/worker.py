"""One rank of a worker script: `torchrun -m tests.ranks.worker SCRIPT [argument ...]`. Ends as a trainer's rank does."""

from __future__ import annotations

import runpy
import sys

from asyncmoe.process import leave

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave(0)
