"""The queue with its journal in a folder, in Redis, and without one: groups put, and batches leased."""

from __future__ import annotations

import asyncio
import gc
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from asyncmoe.config.journal import JournalSection
from asyncmoe.errors import UserError, WaitTimeout
from asyncmoe.journal.belonging import Belonging
from asyncmoe.journal.journal import Journal
from asyncmoe.journal.unjournaled import Unjournaled
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.queue.start_order import Start
from asyncmoe.trajectory import Recording, Trajectory
from benchmarks.provenance import here
from benchmarks.queue import GROUP, SHAPES, trajectories

WAYS = ("none", "folder", "redis")
_AT_ONCE = 32
"""Groups that are put at the same time."""
_IN_BATCH = 8
"""Groups of a batch."""
_TOKENS = 1024
_START_S = 20.0
_MOST = 1 << 34


def run(folder: Path, rounds: int = 5, groups: int = 64) -> dict[str, Any]:
    """Put groups of 8 trajectories of 1,024 tokens, then lease and commit them in batches of 8 groups; each way in turn.

    Args:
        folder: on the disk of the journal and of the Redis server, which is on this machine's Unix socket and syncs at every write.

    Returns:
        "shapes": for each, "group_bytes" and by way, medians of the rounds: groups_per_s from the first to the last that is on disk, GBps,
        cpu_s_per_GB of this process, server_cpu_s_per_GB of Redis, and lease_ms of one batch.

    Raises:
        UserError: there is no Redis server.
        WaitTimeout: it did not start.
    """
    if shutil.which("redis-server") is None:
        raise UserError("asyncmoe bench redis", got="no redis-server", expected="one on the PATH")
    folder = folder.absolute()  # the server has a working directory of its own
    results: dict[str, Any] = {**here(), "rounds": rounds, "groups": groups, "shapes": {}}
    for name, routing in SHAPES.items():
        made = trajectories(routing, _TOKENS)
        measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    measured[way].append(_measure(way, Path(place), made, Recording(routing), groups))
        ways = {way: {key: round(median(one[key] for one in each), 3) for key in each[0]} for way, each in measured.items()}
        results["shapes"][name] = {"group_bytes": int(measured["none"][0]["bytes"] / groups), "ways": ways}
    return results


def table(results: dict[str, Any]) -> str:
    """The results of `run` for a reader."""
    lines = [f"{'':26}{'groups/s':>10}{'GB/s':>8}{'CPU s/GB':>10}{'server':>8}{'lease ms':>10}"]
    for name, shape in results["shapes"].items():
        lines.append(f"{name}: {shape['group_bytes'] / 1e6:.2f} MB a group")
        for way, one in shape["ways"].items():
            lines.append(
                f"  {way:24}{one['groups_per_s']:>10.0f}{one['GBps']:>8.2f}{one['cpu_s_per_GB']:>10.2f}{one['server_cpu_s_per_GB']:>8.2f}"
                f"{one['lease_ms']:>10.2f}"
            )
    return "\n".join(lines)


def _measure(way: str, place: Path, made: Sequence[Trajectory], recording: Recording, groups: int) -> dict[str, float]:
    if way == "none":
        return asyncio.run(_work(Unjournaled(), made, recording, groups)) | {"server_cpu_s_per_GB": 0.0}
    belonging = Belonging.of_run(place, {})
    if way == "folder":
        with closing(Journal.open(place / "journal", belonging, segment_bytes=256 << 20, max_bytes=_MOST)) as journal:
            return asyncio.run(_work(journal, made, recording, groups)) | {"server_cpu_s_per_GB": 0.0}
    from asyncmoe.journal.in_redis import opening

    with _server(place) as socket:
        section = JournalSection(redis=f"unix://{socket}", max_bytes=_MOST)
        with closing(opening.server_of(section)) as server, closing(opening.open_journal(section, belonging)) as journal:
            before = server.call(lambda redis: redis.info("cpu"))
            found = asyncio.run(_work(journal, made, recording, groups))
            after = server.call(lambda redis: redis.info("cpu"))
        spent = sum(after[f"used_cpu_{kind}"] - before[f"used_cpu_{kind}"] for kind in ("user", "sys"))
        return found | {"server_cpu_s_per_GB": spent / found["bytes"] * 1e9}


async def _work(journal: Unjournaled, made: Sequence[Trajectory], recording: Recording, groups: int) -> dict[str, float]:
    total = groups * GROUP
    if isinstance(journal, Journal):
        journal.begin(0, 0, _IN_BATCH * GROUP, 0)
    batch = _IN_BATCH * GROUP
    queue = BoundedQueue(capacity=total, batch=batch, group_size=GROUP, max_staleness=groups, recording=recording, journal=journal)
    numbers = iter(range(groups))

    async def some() -> None:
        for number in numbers:
            members = [made[(number * GROUP + i) % len(made)] for i in range(GROUP)]
            named = [replace(one, key=f"g{number}.e{i}.a0.t0", group=number, episode=i) for i, one in enumerate(members)]
            queue.started(GROUP)
            journal.begun(Start(number))
            await queue.put_group(named)

    gc.collect()
    began, spent = time.monotonic(), time.process_time()
    await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
    put_s, cpu_s = time.monotonic() - began, time.process_time() - spent
    leases, nbytes = [], 0
    for step in range(groups // _IN_BATCH):
        began = time.monotonic()
        leased = await queue.lease(step, "rl", batch, step, _START_S)
        leases.append(time.monotonic() - began)
        nbytes += sum(memoryview(frame).nbytes for frame in queue.fetch(step, [item.key for item in leased.items]))
        queue.commit(step)
        queue.set_version(step + 1)
    return {
        "bytes": nbytes,
        "groups_per_s": groups / put_s,
        "GBps": nbytes / put_s / 1e9,
        "cpu_s_per_GB": cpu_s / nbytes * 1e9,
        "lease_ms": 1e3 * median(leases),
    }


@contextmanager
def _server(place: Path) -> Iterator[Path]:
    socket = place / "redis.sock"
    settings = {"port": "0", "unixsocket": str(socket), "dir": str(place), "save": "", "appendonly": "yes", "appendfsync": "always"}
    command = ["redis-server", *(part for name, value in settings.items() for part in (f"--{name}", value))]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while not socket.exists():
            if time.monotonic() > until:
                raise WaitTimeout("redis-server", "its socket", _START_S)
            time.sleep(0.01)
        yield socket
    finally:
        server.kill()
        server.wait()
