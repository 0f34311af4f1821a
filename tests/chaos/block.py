"""One block: a run that lives through many faults in a row. After each, it must train a new step, and the invariants must hold."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncmoe.queue.fold import LogState
from tests.chaos import faults, invariants
from tests.chaos.faults import Done
from tests.chaos.invariants import Said
from tests.chaos.schedule import Fault
from tests.chaos.world import World
from tests.system.runs import json_lines, marked_pids, wait_for

_ORPHAN_S = 40.0
_POLL_S = 0.1
_IN_HAND = 1
"""Steps that a trainer may still finish without those that it has lost: it has the batch, and its commit may be under way."""

_ENGINES_OF_A_REQUEST = 3
"""Engines that a request may lose before it is given up."""


@dataclass
class Pending:
    """A fault whose recovery is awaited."""

    fault: Fault
    done: Done
    step: int
    said: tuple[int, int, dict[Path, int]]
    cuts: int
    rejected: int
    engines: set[int]


class Block:
    """A run under faults.

    Args:
        faults_: in order.
    """

    def __init__(self, world: World, faults_: Sequence[Fault]) -> None:
        self._world, self._faults = world, faults_
        self._log: LogState | None = None
        self._lost = set[int]()
        """Groups of which damage has left nothing."""
        self._after_damage = False
        self._pending: list[Pending] = []
        self._over: dict[int, float] = {}
        self._floor = 0

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield a record of each fault once the run has recovered from it. Ends after the first violation."""
        world = self._world
        world.start()
        self._await_step(0)
        for at, fault in enumerate(self._faults):
            if fault.moment != "recovery":
                faults.await_moment(world, fault.moment)
            said, cuts, rejected, engines = self._said_now(), len(self._world.cuts()), self._rejected(), world.engines()
            done = faults.do(world, fault)
            self._pending.append(Pending(fault, done, self._world.best(), said, cuts, rejected, engines))
            follows = self._faults[at + 1].moment == "recovery" if at + 1 < len(self._faults) else False
            if follows:
                continue  # the next fault comes while the run still recovers from this one
            yield from (records := list(self._recovered()))
            if any(record["violations"] for record in records):
                return
        yield self._ended()

    # ------------------------------------------------------------ recovery

    def _recovered(self) -> Iterator[dict[str, Any]]:
        """Wait until a new step is trained after all pending faults, with the same command after a stop; say how it went."""
        world, pending, found = self._world, self._pending, list[str]()
        self._pending, self._over = [], {}
        last, noticed = pending[-1], self._noticed(pending)
        causes = tuple(cause for one in pending for cause in faults.causes(one.fault))
        until, starts = time.monotonic() + world.recovery_s, 0
        self._floor = max(one.step for one in pending) + _IN_HAND
        if last.done.stops:
            found += self._stopped(pending, causes, blame=False)
            world.start()
            starts += 1
        while time.monotonic() < until and not (len(self._over) == len(pending) and world.best() > self._floor and (starts or noticed())):
            self._undo(pending, world.running)
            if not world.running:
                found += self._stopped(pending, causes)
                if last.done.restore is not None and starts == 1:
                    last.done.restore()
                world.start()
                starts += 1
            time.sleep(_POLL_S)
        now = time.monotonic()
        if now >= until:
            told = f"over {sorted(self._over)}, noticed {noticed()}"
            found.append(f"after {world.recovery_s:.0f} s: step {world.best()}, expected {self._floor + 1}; {told}")
        found += self._holds(pending, causes)
        cuts, again = world.cuts()[pending[0].cuts :], self._rejected() - pending[0].rejected
        if again and len(pending) < _ENGINES_OF_A_REQUEST:
            found.append(f"{again} responses were started over, and lost more than the piece under way")
        for one in pending:
            yield {
                "fault": str(one.fault),
                "kind": "kill" if one.done.stops and not one.done.target else one.fault.kind,
                "target": one.done.target or ("everything" if one.done.stops else "nothing"),
                "moment": one.fault.moment,
                "seconds": round(now - self._over.get(one.fault.number, one.done.at), 2),
                "starts": starts,
                "cut_tokens": sum(cuts),
                "most_cut": max(cuts, default=0),
                "started_over": again,
                "engines_taken_over": len(pending[0].engines & world.engines()) if self._takes_over(pending) else 0,
                "causes": self._said(pending[0]).causes,
                "violations": found,
            }

    def _takes_over(self, pending: Sequence[Pending]) -> bool:
        """Whether the next controller takes over the engines of one that was killed."""
        return len(pending) == 1 and (pending[0].done.target, pending[0].fault.kind) == ("controller", "kill")

    def _noticed(self, pending: Sequence[Pending]) -> Callable[[], bool]:
        return lambda: all(faults.noticed(one.fault, one.done, self._said(one)) for one in pending)

    def _undo(self, pending: Sequence[Pending], running: bool) -> None:
        """End the faults whose time is over, and all faults of a run that has ended; then expect two more steps."""
        for one in pending:
            if one.fault.number in self._over:
                continue
            gone = one.fault.kind == "hang" and one.done.target not in self._world.pids()
            if time.monotonic() >= one.done.until or not running or gone:
                one.done.undo()
                self._over[one.fault.number] = time.monotonic() if one.done.until else one.done.at
                if one.done.until:
                    self._floor = max(self._floor, self._world.best() + _IN_HAND)

    # ------------------------------------------------------------ invariants

    def _holds(self, pending: Sequence[Pending], causes: Sequence[str]) -> list[str]:
        """Return violations during the run."""
        world = self._world
        found = [*invariants.trained_once(self._world.trained()), *invariants.ledger_exact(json_lines(world.run_dir / "rollout.jsonl"))]
        return found + world.wrongs()[:3] + list(invariants.cause_named(causes, self._said(pending[0])))

    def _stopped(self, pending: Sequence[Pending], causes: Sequence[str], *, blame: bool = True) -> list[str]:
        """Return violations of a run that has ended: leftover processes, the cause it names, its log."""
        world = self._world
        mark, found = world.command.mark, list[str]()
        if not wait_for(lambda: not marked_pids(mark), _ORPHAN_S):
            found.append(f"{len(marked_pids(mark))} processes are left {_ORPHAN_S:.0f} s after the end: {world.pids()}")
            world.end_all()
        if blame:
            found += invariants.cause_named(causes, self._said(pending[0]))
        damaged = any(one.fault.kind == "damage" and one.done.restore is not None for one in pending)
        found += self._log_holds(damaged or self._after_damage)
        self._after_damage = damaged
        return found

    def _log_holds(self, damaged: bool = False) -> list[str]:
        now, world = self._world.log_state(), self._world
        ended = self._lost | invariants.ended_of(json_lines(world.run_dir / "samples" / "rollout.jsonl"))
        if damaged:
            self._lost |= set(range(now.next)) - set(now.groups) - ended - invariants.groups_of(world.trained())
        found = [] if damaged else list(invariants.nothing_lost(self._log, now, world.trained(), ended, world.warm))
        self._log = now
        return found

    def _ended(self) -> dict[str, Any]:
        """Stop the run as a user does; no process may be left."""
        world = self._world
        world.command.process.send_signal(signal.SIGINT)
        ended = wait_for(lambda: not world.running, 60.0)
        mark, found = world.command.mark, [] if ended else ["the run did not end within 60 s of Ctrl-C"]
        if not wait_for(lambda: not marked_pids(mark), _ORPHAN_S):
            found.append(f"processes are left: {world.pids()}")
        found += self._log_holds() + list(invariants.trained_once(self._world.trained()))
        found += [f"left over: {name}" for name in world.leftovers()]
        if (world.run_dir / "rendezvous.json").exists():
            found.append("left over: rendezvous.json")
        lineage = invariants.newest(self._world.trained())
        return {"kind": "end", "steps": len(lineage), "starts": world.starts, "violations": found}

    # ------------------------------------------------------------ observations

    def _await_step(self, beyond: int) -> None:
        if not wait_for(lambda: self._world.best() > beyond, self._world.recovery_s):
            raise AssertionError(f"no step\n{self._world.said.read_text()[-2000:]}")

    def _rejected(self) -> int:
        """Responses that were given up so far, with the others of their groups, as the ledger counts them."""
        told = json_lines(self._world.run_dir / "rollout.jsonl")
        return sum(told[-1]["rejected"].values()) if told else 0

    def _said_now(self) -> tuple[int, int, dict[Path, int]]:
        said = self._world.said
        return (self._world.starts, said.stat().st_size if said.exists() else 0, {path: len(text) for path, text in self._logs().items()})

    def _said(self, since: Pending) -> Said:
        start, at, logs = since.said
        supervisor = "".join(
            path.read_text()[at if number == start else 0 :]
            for number in range(start, self._world.starts + 1)
            if (path := self._world.folder / f"said-{number}.txt").exists()
        )
        return Said(supervisor, "".join(text[logs.get(path, 0) :] for path, text in self._logs().items()))

    def _logs(self) -> dict[Path, str]:
        """Return the logs of the controller and of those who look after engines."""
        logs = self._world.run_dir / "logs"
        return {path: path.read_text(errors="replace") for path in (*logs.glob("controller.log"), *logs.glob("engine-*-joins.log"))}
