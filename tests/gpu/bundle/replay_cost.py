"""What replayed experts add to a trainer's step on this machine: `python -m tests.gpu.bundle.replay_cost RESULT`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import replay
from tests.gpu.bundle.summary import write_outcome


def main() -> None:
    found = replay.run()
    figures = {"step": (found["step_seconds"], "s"), "replay_share": (found["share"], "of a step"), "tokens": (found["tokens"], "tokens")}
    write_outcome(Path(sys.argv[1]), figures)


if __name__ == "__main__":
    main()
