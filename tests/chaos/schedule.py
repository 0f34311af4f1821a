"""Which fault comes next, where, and at which moment. Pure: the draws depend on the seed and the block's number alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

Kind = Literal["kill", "stop", "hang", "interrupt", "drop", "delay", "half", "full disk", "slow disk", "clock", "damage"]
Moment = Literal["any time", "recovery", "staging", "commit", "checkpoint", "payload", "change"]

PROCESSES = ("supervisor", "controller", "worker.1", "agent", "rank.0", "rank.1", "engine.0", "engine.1", "joiner.0", "joiner.1")
"""engine.0 and engine.1 here are the first and the second server that runs, whatever its seed; joiner.0 is the `asyncmoe engine` of one."""
FILES = ("checkpoint", "payloads", "turns", "changes", "rendezvous.json", "log.json")
KINDS: dict[Kind, tuple[float, tuple[str, ...]]] = {
    "kill": (8.0, PROCESSES),
    "stop": (4.0, PROCESSES),
    "hang": (1.0, ("controller", "worker.1", "rank.0", "rank.1", "engine.0", "engine.1", "joiner.0", "joiner.1")),
    "interrupt": (0.5, ("supervisor",)),
    "drop": (1.5, ("engine.0", "engine.1")),
    "delay": (1.5, ("engine.0", "engine.1")),
    "half": (1.5, ("engine.0", "engine.1")),
    "full disk": (1.0, ("disk",)),
    "slow disk": (1.5, ("disk",)),
    "clock": (1.5, ("clock",)),
    "damage": (2.0, FILES),
}
"""Of each kind: how often it is drawn, and its targets."""
MOMENTS: dict[Moment, float] = {
    "any time": 4.0,
    "recovery": 2.0,
    "staging": 2.0,
    "commit": 2.0,
    "checkpoint": 2.0,
    "payload": 2.0,
    "change": 2.0,
}
"""recovery: while the run still recovers from the fault before. The others: at the next sign that a version is staged or committed, a
checkpoint is written, a payload or a change is written to the log."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        number: in its block.
        after_s: seconds after the moment.
        seconds: how long it lasts, if it lasts.
        amount: in 0 ... 1: its severity, or its position in a file.
    """

    number: int
    kind: Kind
    target: str
    moment: Moment
    after_s: float
    seconds: float
    amount: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.target}, {self.moment}"


def block(seed: int, number: int, size: int, kinds: Mapping[Kind, tuple[float, tuple[str, ...]]] = KINDS) -> Iterator[Fault]:
    """Yield the faults of a block in order."""
    draw = Random(f"chaos {seed} {number}")
    before: Fault | None = None
    for at in range(size):
        (kind,) = draw.choices(list(kinds), [share for share, _ in kinds.values()])
        (moment,) = draw.choices(list(MOMENTS), list(MOMENTS.values()))
        if kind == "damage" or at == 0 or (before is not None and before.kind == "damage"):
            moment = "any time" if moment == "recovery" else moment
        fault = Fault(
            at,
            kind,
            draw.choice(kinds[kind][1]),
            moment,
            draw.uniform(0.0, 4.0) if moment == "recovery" else draw.uniform(0.0, 0.8) if moment == "any time" else draw.uniform(0.0, 0.03),
            draw.uniform(0.3, 3.0),
            draw.random(),
        )
        yield fault
        before = fault
