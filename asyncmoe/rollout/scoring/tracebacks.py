"""What a user's scorer raises: file, line and traceback, kept once for each place with a count."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from asyncmoe import plugins, storage
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import SHOWN

_OWN = str(Path(plugins.__file__).parent)
_FRAMES, _CAUSES = 32, 4
_TRACE_CHARS = 8000
_DISTINCT = 32


@dataclass(frozen=True)
class Raised:
    """An exception of a user's scorer.

    Attributes:
        at: "FILE:LINE" that raised it; where the scorer is defined, if it could not be called.
        said: type and message.
        trace: the traceback, from the scorer's own code on, without messages; at most `_TRACE_CHARS` characters.
    """

    at: str
    said: str
    trace: str


class ScorerRaised(TrajectoryRejected):
    """A user's scorer raised."""

    def __init__(self, reason: str, raised: Raised) -> None:
        self.raised = raised
        super().__init__(reason, f"{raised.said} ({raised.at})")


def raised_by(error: BaseException, scorer: Callable[..., Any]) -> Raised:
    """Describe an exception that a call of `scorer` raised."""
    parts, cause = list[str](), cast(BaseException | None, error)
    while cause is not None and len(parts) <= _CAUSES:
        frames = [one for one in traceback.extract_tb(cause.__traceback__) if not one.filename.startswith(_OWN)]
        shown = "".join(traceback.StackSummary.from_list(frames[-_FRAMES:]).format())
        parts.append(f"Traceback of {type(cause).__name__} (most recent call last):\n{shown}")
        cause = cause.__cause__
    at = plugins.raised_at(error) or plugins.place(scorer)
    return Raised(at, plugins.told(error)[:SHOWN], "caused by\n".join(parts)[:_TRACE_CHARS])


class Tracebacks:
    """Distinct tracebacks, counted. After the first `_DISTINCT`, others are only counted. One thread may note while another writes."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str, Raised]] = {}
        self._others = 0
        self._written = 0

    @property
    def count(self) -> int:
        return self._others + sum(count for count, _, _ in list(self._found.values()))

    def note(self, raised: Raised) -> None:
        """Count an exception."""
        if raised.trace not in self._found and len(self._found) >= _DISTINCT:
            self._others += 1
            return
        count, first, _ = self._found.get(raised.trace, (0, f"{datetime.now():%Y-%m-%d %H:%M:%S}", raised))
        self._found[raised.trace] = count + 1, first, raised

    def text(self) -> str:
        """Return all tracebacks, the most frequent first, each with its count and its latest message."""
        parts = [
            f"{count} times since {first}, at {raised.at}\n{raised.trace}{raised.said}\n"
            for count, first, raised in sorted(self._found.values(), key=lambda found: -found[0])
        ]
        return "\n".join([*parts, *([f"{self._others} times elsewhere\n"] if self._others else [])])

    def write(self, run_dir: Path, worker: int) -> None:
        """Replace the log of a rollout worker in `run_dir`, if anything was counted since.

        Raises:
            StorageError: it cannot be written.
        """
        if (count := self.count) == self._written:
            return
        file = run_dir / "logs" / f"scoring-{worker}.log"
        with storage.writing("log of the scorer's exceptions", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            storage.replace(file, self.text().encode(errors="backslashreplace"))
        self._written = count
