"""Worker: ranks that write down their process ids, of which the last may fail and the others do not end. `launched.py RESULT FOLDER HOW`,
where HOW is "fails" or "waits"."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def main(folder: Path, how: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"{rank}.part").write_text(str(os.getpid()))
    (folder / f"{rank}.part").rename(folder / f"{rank}.pid")
    while len(list(folder.glob("*.pid"))) < world:
        time.sleep(0.01)
    if how == "fails" and rank == world - 1:
        raise ValueError("this rank fails")
    time.sleep(3600)


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3])
