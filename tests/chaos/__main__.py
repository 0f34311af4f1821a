"""`python -m tests.chaos --out FILE`: blocks of random faults, each block a run; the same command continues with those missing from FILE.

FILE has one JSON object a line: a record of each fault, and one of each run's end. A block that was broken off keeps its records, and the
next one follows. `--only BLOCK` runs one again; `--report` prints the summary. After a violation the status is 1, and the run's folder is
kept beside FILE.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from tests.chaos import report, schedule
from tests.chaos.block import Block
from tests.chaos.real_world import REAL, RealWorld
from tests.chaos.redis_world import REDIS, RedisWorld
from tests.chaos.world import World

TIERS = {"protocol": (schedule.KINDS, World), "redis": (REDIS, RedisWorld), "real": (REAL, RealWorld)}
"""Of each tier: the kinds of faults and the world that they meet."""


def main(arguments: list[str]) -> int:
    """Run the command line `arguments`; return the exit status."""
    asked = _parsed(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under faults ends too
    records = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.report:
        about = {"date": datetime.date.today().isoformat(), "cores": os.cpu_count()}
        print(json.dumps({**about, **report.summary(records)}, indent=1))
        return 0
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    bad, until = 0, time.monotonic() + asked.minutes * 60
    with asked.out.open("a", buffering=1) as out:
        for block in _blocks(records, asked):
            for record in _run(block, asked):
                out.write(json.dumps(record) + "\n")
                records.append(record)
                bad += bool(record["violations"])
                print(_line(record), flush=True)
            if time.monotonic() > until or (bad and not asked.go_on):
                break
    return 1 if bad else 0


def _blocks(records: list[dict[str, Any]], asked: argparse.Namespace) -> Iterator[int]:
    """Yield the numbers of blocks until this many faults are recorded."""
    if asked.only is not None:
        yield asked.only
        return
    for block in count():
        if sum(one["tier"] == asked.tier and one["kind"] != "end" for one in records) >= asked.faults:
            return
        if not any((one["tier"], one["block"]) == (asked.tier, block) for one in records):
            yield block


def _run(block: int, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    kinds, made = TIERS[asked.tier]
    faults = list(schedule.block(asked.seed, block, asked.size, kinds))
    with made(block) as world:
        for record in Block(world, faults).run():
            yield {"tier": asked.tier, "block": block, "seed": asked.seed, **record}
            if record["violations"]:
                kept = asked.out.parent / f"{asked.tier}-{block}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(world.folder, kept, ignore=shutil.ignore_patterns("model", "ballast", "*.so", "*.sock", "t"))


def _line(record: dict[str, Any]) -> str:
    if record["kind"] == "end":
        return f"block {record['block']}: ended after {record['steps']} steps and {record['starts']} starts {record['violations'] or ''}"
    what = f"block {record['block']}: {record['fault']} ({record['target']}): {record['seconds']} s, {record['starts']} starts"
    return f"{what} {'; '.join(record['violations'])}".rstrip()


def _parsed(arguments: list[str]) -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__, formatter_class=shape)
    parser.add_argument("--out", type=Path, default=Path("build/chaos/results.jsonl"), help="file of results, which a later run continues")
    parser.add_argument(
        "--tier", choices=tuple(TIERS), default="protocol", help="stand-ins for engines and ranks, also with Redis, or real ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=2000, help="faults of the tier in the file after which it ends")
    parser.add_argument("--size", type=int, default=25, help="faults of a block")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further block after so many minutes")
    parser.add_argument("--only", type=int, help="run one block")
    parser.add_argument("--go-on", action="store_true", help="go on with the next block after a violation")
    parser.add_argument("--report", action="store_true", help="print the summary of the file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
