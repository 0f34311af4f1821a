"""The live view of a run: on the terminal and, if configured, in Prometheus and loggers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from types import TracebackType

from rich.console import Console
from rich.live import Live

from asyncmoe.config import Config
from asyncmoe.telemetry.follow import Followed, Follower, Sink
from asyncmoe.telemetry.loggers import checks
from asyncmoe.telemetry.loggers.sink import LoggerSink, client
from asyncmoe.telemetry.prometheus import Prometheus
from asyncmoe.telemetry.records import sessions
from asyncmoe.telemetry.rejected import evaluated, rejected
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Resume, Step
from asyncmoe.telemetry.screen import RECENT_ROLLOUTS, RECENT_STEPS, View, line, panel


class LiveView:
    """Follows the files of `config.run.dir`. Use as a context manager and call `refresh` a few times per second.

    On a terminal (or with `telemetry.live: on`) it redraws one panel; otherwise it prints one line per step. The panel includes the records
    of earlier starts of the run, but they are not printed again.

    Args:
        sinks: get new records too; they are not closed.
    """

    def __init__(self, config: Config, console: Console | None = None, sinks: Sequence[Sink] = ()) -> None:
        self._config, self._given = config, sinks
        self._console = console or Console()
        wanted = config.telemetry.live
        self._live = (
            Live(console=self._console, auto_refresh=False) if wanted == "on" or (wanted == "auto" and self._console.is_terminal) else None
        )
        self._follower = Follower(config.run.dir)
        self._view = View(config.run.dir.name, config.warmup.steps, config.warmup.steps + config.run.steps)
        self._rollout: deque[Rollout] = deque(maxlen=RECENT_ROLLOUTS)
        self._sinks: list[Sink] = []
        self._stack = ExitStack()

    def __enter__(self) -> LiveView:
        with ExitStack() as stack:
            before = self._follower.poll()
            self._take(before)
            self._sinks += self._given
            config, port = self._config, self._config.telemetry.prometheus_port
            made: list[Sink] = [] if port is None else [Prometheus(port)]
            made += [LoggerSink(config, name, client(config, name), before, self.say) for name in checks.configured(config.telemetry)]
            for sink in made:
                stack.callback(sink.close)
                self._sinks.append(sink)
            if self._live:
                stack.enter_context(self._live)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is None and (gone := rejected(self._view.rollout)):
            self._print(f"rejected {gone}")
        self._stack.close()

    def refresh(self) -> None:
        """Read and show new records.

        Raises:
            DataError: a complete line is malformed; names file and line.
        """
        new = self._follower.poll()
        self._take(new)
        for sink in self._sinks:
            sink.feed(new)
        if self._live:
            self._live.update(panel(self._view), refresh=True)
            return
        for record in new:
            if isinstance(record, Step):
                self._print(line(self._view, record))
            elif isinstance(record, Evaluation):
                self._print(f"evaluated {evaluated(record)}")

    def say(self, text: str) -> None:
        """Show a message below the panel's rows, or print it without a panel."""
        self._view = replace(self._view, message=text)
        if self._live is None or not self._live.is_started:
            self._print(text)

    def _take(self, records: list[Followed]) -> None:
        self._rollout.extend(record for record in records if isinstance(record, Rollout))
        steps = [record for record in records if isinstance(record, Step | Resume)]
        valid = [*chain.from_iterable(sessions([*self._view.steps, *steps]))][-RECENT_STEPS:] if steps else self._view.steps
        evaluations = [record for record in records if isinstance(record, Evaluation)]
        newest = evaluations[-1] if evaluations else self._view.evaluation
        self._view = replace(self._view, steps=valid, rollout=tuple(self._rollout), evaluation=newest)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
