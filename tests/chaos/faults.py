"""Injection of each kind of fault, and the causes that the run may then name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncmoe.checkpoints import directories
from tests.chaos.invariants import Said
from tests.chaos.schedule import Fault, Moment
from tests.chaos.world import ENGINE_PARTS, World

_MOMENT_S = 6.0
"""Longest wait for a moment; then the fault comes anyhow."""
_POLL_S = 0.002
HANG_S = 45.0
"""How long a process is stopped that hangs, unless it is replaced before."""
_SILENT = r"silent|stacks of every process"
_LOST = r"no engine is left|publishing version|beginning version|starting the weight receivers|weight group|receiver"
CAUSES: dict[tuple[str, str], tuple[str, ...]] = {
    ("kill", "supervisor"): (),
    ("kill", "controller"): (r"controller ended with status -9", r"controller.*SIGKILL"),
    ("kill", "worker"): (),
    ("kill", "agent"): (r"trainer ended with status -9", r"trainer.*SIGKILL"),
    ("kill", "rank"): (r"a rank was ended by SIGKILL",),
    ("kill", "engine"): (_LOST, r"engine\.\d+ did not start: ended with status -9"),
    ("stop", "engine"): (_LOST,),
    ("hang", "controller"): (_SILENT,),
    ("hang", "worker"): (_SILENT,),
    ("hang", "rank"): (_SILENT, r"took no part in a collective for", r"Timed out waiting"),
    ("hang", "engine"): (_LOST, r"no token for", r"waited .* s for engine\.\d+: start"),
    ("kill", "joiner"): (_LOST, r"engine\.\d+ ended with status -9"),
    ("hang", "joiner"): (_LOST, r"no heartbeat for"),
    ("drop", "engine"): (_LOST,),
    ("delay", "engine"): (_LOST,),
    ("half", "engine"): (_LOST,),
    ("full disk", "disk"): (r"No space left on device", r"ENOSPC"),
    ("damage", "checkpoint"): (r"is damaged",),
    ("damage", "log.json"): (r"log\.json",),
}
"""By kind and what sort of target it has: the causes that may be named. Where there are none, no end may be blamed on anything."""


_LOGS = {"payloads": "1", "turns": "1.turns", "changes": "0"}
"""Damage of these ends no run: it goes on without the records that are lost."""


@dataclass(frozen=True)
class Done:
    """An injected fault.

    Attributes:
        at: monotonic time.
        target: the affected process ("engine.3"); "" if there was no such process.
        undo: ends a lasting fault.
        until: monotonic time at which to call it.
        stops: whether the run was stopped for it, and must be restarted.
        restore: restores damaged files; None: there is nothing to restore.
    """

    at: float
    target: str
    undo: Callable[[], None] = lambda: None
    until: float = 0.0
    stops: bool = False
    restore: Callable[[], None] | None = None


def causes(fault: Fault) -> tuple[str, ...]:
    """Return the causes that a run may name after a fault."""
    sort = fault.target.partition(".")[0] if fault.kind != "damage" else fault.target
    sort = "engine" if sort in ENGINE_PARTS else sort
    return CAUSES.get((fault.kind, sort), ())


def noticed(fault: Fault, done: Done, said: Said) -> bool:
    """Return whether the run shows signs of a fault that it survives. For a fault that ends the run, the end is the sign."""
    sort = fault.target.partition(".")[0]
    if sort == "supervisor" and fault.kind in ("kill", "interrupt"):
        return False
    if fault.kind != "kill" or sort not in ("engine", *ENGINE_PARTS) or not done.target:
        return True
    return re.search(r"engine\.\d+ is fenced|engine\.\d+.*: ended with status -9", said.controller) is not None


def await_moment(world: World, moment: Moment) -> None:
    """Wait for the next sign of the moment, or for a while without one."""
    if moment in ("any time", "recovery"):
        return
    before, until = world.sign(moment), time.monotonic() + _MOMENT_S
    while time.monotonic() < until and ((now := world.sign(moment)) == before or now is None):
        time.sleep(_POLL_S)


def do(world: World, fault: Fault) -> Done:
    """Inject a fault into a run."""
    time.sleep(fault.after_s)
    match fault.kind:
        case "kill" if world.server is not None and fault.target == "redis":
            world.server.kill()
            now = time.monotonic()
            return Done(now, "redis", world.serve_log, now + fault.seconds)
        case "kill" | "interrupt":
            return _signalled(world, fault, signal.SIGKILL if fault.kind == "kill" else signal.SIGINT)
        case "stop" | "hang":
            done = _signalled(world, fault, signal.SIGSTOP)
            pid = world.pids().get(done.target, 0)
            seconds = fault.seconds if fault.kind == "stop" else HANG_S
            return Done(done.at, done.target, lambda: _continued(pid), done.at + seconds)
        case "drop" | "delay" | "half":
            target = _target(world, fault)
            does = {"delay_s": 4.0 * fault.amount} if fault.kind == "delay" else {fault.kind: 0.2 + 0.8 * fault.amount}
            world.network(target.removeprefix("engine."), fault.seconds, **does)
            now = time.monotonic()
            return Done(now, target, until=now + fault.seconds)
        case "full disk":
            world.fill()
            now = time.monotonic()
            return Done(now, "disk", world.empty, now + 3.0 + 5.0 * fault.amount)
        case "slow disk":
            world.disturb(fsync_us=int(400_000 * fault.amount))
            now = time.monotonic()
            return Done(now, "disk", world.disturb, now + fault.seconds)
        case "clock":
            world.disturb(clock_s=int((fault.amount - 0.5) * 200_000))
            now = time.monotonic()
            return Done(now, "clock", world.disturb, now + fault.seconds)
        case "damage":
            return _damaged(world, fault)


def _signalled(world: World, fault: Fault, number: signal.Signals) -> Done:
    target = _target(world, fault)
    pid = world.pids().get(target)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return Done(time.monotonic(), target if pid is not None else "")


def _target(world: World, fault: Fault) -> str:
    """Return the role that a fault meets; engines have the numbers of their seeds, which grow with every restart, their parts those of
    their processes."""
    sort, _, number = fault.target.partition(".")
    if sort not in ("engine", *ENGINE_PARTS):
        return fault.target
    found = sorted((role for role in world.pids() if role.startswith(f"{sort}.")), key=lambda role: int(role.partition(".")[2]))
    return found[int(number) % len(found)] if found else ""


def _continued(pid: int) -> None:
    with suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------- damage


def _damaged(world: World, fault: Fault) -> Done:
    """Stop the run with SIGKILL and damage a file; its old content is kept next to it."""
    world.end_all()
    path = _file(world.run_dir, fault)
    now = time.monotonic()
    if path is None or not path.stat().st_size:
        return Done(now, "", stops=True)
    kept = world.folder / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    shutil.copy(world.run_dir / "log.json", kept)

    def restore() -> None:
        shutil.copy(kept / "log.json", world.run_dir)

    data = bytearray(path.read_bytes())
    if fault.number % 2 and fault.target in ("log.json", "rendezvous.json"):
        del data[len(data) // 2 :]
    else:
        at = int(len(data) * (0.1 + 0.5 * fault.amount))
        data[at : at + 8] = bytes(255 - one for one in data[at : at + 8])
    path.write_bytes(data)
    if fault.target in _LOGS:
        world.damaged()
    return Done(now, str(path.relative_to(world.run_dir)), stops=True, restore=restore)


def _file(run_dir: Path, fault: Fault) -> Path | None:
    match fault.target:
        case "checkpoint":
            found = directories.complete(run_dir)
            return max(found[-1].iterdir(), key=lambda path: path.stat().st_size) if len(found) > 1 else None
        case "payloads" | "turns" | "changes":
            files = sorted((run_dir / "log" / _LOGS[fault.target]).glob("*.segment"))
            return files[int(len(files) * fault.amount)] if files else None
        case _:
            path = run_dir / fault.target
    return path if path.exists() else None
