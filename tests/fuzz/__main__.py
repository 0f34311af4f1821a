"""`python -m tests.fuzz --out FILE`: all parts in blocks, each of which begins where the last of an earlier run of the same file ended.

A block's draws depend on the seed, the part and the block's number alone. The program ends with status 1 at the first fault, having said
the part and the block; `--only PART --block N` runs that one again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz import endpoints, frames, target

BLOCK = 10_000
MAX_GROWTH_BYTES = 256 << 20
"""Growth of the attacked process's memory over a whole run, above which it counts as unbounded."""
MAX_TURN_CPU_S = 0.5
"""Most CPU seconds of the controller's event loop in which nothing else gets a turn."""
MAX_LAG_S = 10.0
"""Longest stall of that loop on the clock, which includes what else the machine does meanwhile."""

Part = Callable[[Random, int], Mapping[str, int]]


def main(arguments: list[str]) -> None:
    """Run what `arguments` say; write the results after each block."""
    asked = _parsed(arguments)
    result: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out and asked.out.exists() else {"seed": asked.seed, "parts": {}}
    if result["seed"] != asked.seed:
        sys.exit(f"{asked.out}: got seed {result['seed']}, expected {asked.seed}; remove the file to begin anew")
    result |= {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), "block": BLOCK}
    with tempfile.TemporaryDirectory() as folder:
        attacked = frames.Attacked(Path(folder))
        try:
            for name, (part, count) in _parts(attacked, asked.frames, asked.bodies).items():
                if asked.only in (None, name):
                    _run(name, part, count, result, asked, attacked)
        finally:
            attacked.close()


def _parts(attacked: frames.Attacked, count: int, bodies: int) -> dict[str, tuple[Part, int]]:
    return {
        "member": (partial(frames.member, attacked), count),
        "stranger": (partial(frames.stranger, attacked), count),
        **{f"openai {path}": (partial(endpoints.openai, path), bodies) for path in endpoints.BODIES},
    }


def _run(name: str, part: Part, count: int, result: dict[str, Any], asked: argparse.Namespace, attacked: frames.Attacked) -> None:
    """Run a part's blocks that are still to be done."""
    found = result["parts"].setdefault(re.sub(r"\W+", "-", name), {"count": 0, "seconds": 0.0, "outcomes": {}, "rss_bytes": []})
    against = attacked.process.pid if name in ("member", "stranger") else None
    begin = found["count"] if asked.block is None else asked.block * BLOCK
    for at in range(begin, count if asked.block is None else begin + 1, BLOCK):
        began, size = time.monotonic(), min(BLOCK, count - at)
        try:
            outcomes = part(Random(f"{asked.seed} {name} {at // BLOCK}"), size)
            if against is not None:
                frames.works(attacked)
        except BaseException:
            print(f"{name}, seed {asked.seed}: a fault in block {at // BLOCK}", file=sys.stderr, flush=True)
            raise
        found["count"] = at + size
        found["seconds"] = round(found["seconds"] + time.monotonic() - began, 1)
        found["outcomes"] = dict(Counter(found["outcomes"]) + Counter(outcomes))
        found["rss_bytes"].append(target.rss_bytes(against or os.getpid()))
        if against is not None:
            vitals = attacked.vitals()
            found["ended"], found["descriptors"] = vitals[-1]["ended"], vitals[-1]["descriptors"]
            for name_of, limit in {"worst_lag_s": MAX_LAG_S, "worst_turn_cpu_s": MAX_TURN_CPU_S}.items():
                found[name_of] = max([found.get(name_of, 0.0), *(one[name_of] for one in vitals[1:])])
                assert found[name_of] < limit, f"{name_of}: got {found[name_of]}, expected less than {limit}"
        growth = found["rss_bytes"][-1] - found["rss_bytes"][0]
        assert growth < MAX_GROWTH_BYTES, f"{name}: {growth} bytes more than after the first block"
        print(f"{name}: {found['count']} of {count}, {found['seconds']} s, {found['rss_bytes'][-1] >> 20} MiB, {outcomes}", flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(result, indent=1) + "\n")


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the results, which a later run continues")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames as a member, and as many as a stranger")
    parser.add_argument("--bodies", type=int, default=100_000, help="bodies to each endpoint")
    parser.add_argument("--only", help="one part")
    parser.add_argument("--block", type=int, help="one block of it")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
