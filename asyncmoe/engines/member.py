"""An engine and its state in the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from asyncmoe.engines.engine import EngineHandle
from asyncmoe.telemetry.clock import unix

_serials = count(1)
RecordBusy = Callable[[str, float, float], None]
"""Called with an engine's name, and begin and end (Unix seconds) of an interval in which it was generating."""


@dataclass(eq=False)
class Member:
    """An engine and its state in the pool.

    Attributes:
        version, lineage: the version the engine serves, and its lineage.
        in_flight: number of requests sent but not answered.
        by_dp_rank: the same for each of its groups of ranks (`engines.dp_attention`).
        elsewhere: number of requests in flight from rollout workers.
        fenced: why it takes no more requests, or None.
        waiting: True if it has joined but not received a version.
        leaving: True if it only finishes its current requests.
        busy_since: Unix time at which its unrecorded generation began, or None if idle.
        heard: monotonic time at which it last answered.
        suspect: True if a request or a probe has timed out since `heard`.
        compared: True once the weights it loaded from the model's files were found to match the trainer's.
        serial: identifies this start of the engine; unique within this process.
    """

    engine: EngineHandle
    version: int = 0
    lineage: int = 0
    in_flight: int = 0
    by_dp_rank: Counter[int] = field(default_factory=Counter)
    elsewhere: int = 0
    fenced: str | None = None
    waiting: bool = False
    leaving: bool = False
    busy_since: float | None = None
    heard: float = 0.0
    suspect: bool = False
    compared: bool = False
    serial: int = field(default_factory=_serials.__next__)

    @property
    def salt(self) -> str:
        """Salt of its cached prefixes: the same version has different weights in different lineages."""
        return str(self.version) if not self.lineage else f"{self.version}.{self.lineage}"

    def serve(self, version: int, lineage: int) -> None:
        """Note that the engine serves a version."""
        self.version, self.lineage, self.waiting = version, lineage, False

    def entered(self, dp_rank: int = 0) -> None:
        """Note that a request was sent to a group of the engine's ranks."""
        self.in_flight += 1
        self.by_dp_rank[dp_rank] += 1
        if self.in_flight == 1:
            self.generates()

    def left(self, record: RecordBusy, dp_rank: int = 0) -> None:
        """Note that a request was answered or has failed; after the last one the engine is idle."""
        self.in_flight -= 1
        self.by_dp_rank[dp_rank] -= 1
        if self.in_flight == 0:
            self.idle(record)

    def generates(self) -> None:
        """Count the time from now on as generation, unless it already counts or the engine has no requests."""
        if self.in_flight and self.busy_since is None:
            self.busy_since = unix()

    def idle(self, record: RecordBusy) -> None:
        """Record the generation up to now; time from now on does not count."""
        self.note_busy(record)
        self.busy_since = None

    def note_busy(self, record: RecordBusy) -> None:
        """Record the generation up to now, without waiting until the engine is idle."""
        if self.busy_since is not None:
            now = unix()
            record(self.engine.name, self.busy_since, now)
            self.busy_since = now
