"""Live output of a run: lines on the terminal and, if configured, Prometheus and loggers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing
from itertools import chain

from rich.console import Console

from asyncmoe.config import Config
from asyncmoe.telemetry.advice import advise
from asyncmoe.telemetry.format import ABSENT, duration, named, quantity
from asyncmoe.telemetry.loggers import checks
from asyncmoe.telemetry.loggers.sink import LoggerSink, client
from asyncmoe.telemetry.measured import median
from asyncmoe.telemetry.metric import declared
from asyncmoe.telemetry.prometheus import Prometheus
from asyncmoe.telemetry.records import Feed, Followed, Follower, sessions
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Resume, Step
from asyncmoe.telemetry.summary import evaluated, rejected

RECENT_STEPS = 10
RECENT_ROLLOUTS = 30


class LiveView:
    """Follows the files of `config.run.dir`. Use as a context manager and call `refresh` a few times per second.

    It prints a line for each step and evaluation, and advice when it changes. Records of earlier starts are not printed again.

    Args:
        feeds: get the new records, too.
    """

    def __init__(self, config: Config, console: Console | None = None, feeds: Sequence[Feed] = ()) -> None:
        self._config, self._console, self._feeds = config, console or Console(), list(feeds)
        self._follower = Follower(config.run.dir)
        self._steps: list[Step] = []
        self._rollout: deque[Rollout] = deque(maxlen=RECENT_ROLLOUTS)
        self._remedy = ""
        self._stack = ExitStack()

    def __enter__(self) -> LiveView:
        before, config, port = self._follower.poll(), self._config, self._config.telemetry.prometheus_port
        self._take(before)
        with ExitStack() as stack:
            if port is not None:
                self._feeds.append(stack.enter_context(closing(Prometheus(port))).feed)
            for name in checks.configured(config.telemetry):
                sink = LoggerSink(config, name, client(config, name), before, self.say)
                self._feeds.append(stack.enter_context(closing(sink)).feed)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        if gone := rejected(list(self._rollout)):
            self.say(f"rejected {gone}")
        self._stack.close()

    def refresh(self) -> None:
        """Read and show new records.

        Raises:
            DataError: a complete line is malformed; names file and line.
        """
        new = self._follower.poll()
        self._take(new)
        for feed in self._feeds:
            feed(new)
        for record in new:
            if isinstance(record, Step):
                self.say(line(record, self._config.warmup.steps, self._config.run.steps, self._left(record)))
            elif isinstance(record, Evaluation):
                self.say(f"evaluated {evaluated(record)}")
        if any(isinstance(record, Step) for record in new):
            self._advise()

    def say(self, text: str) -> None:
        """Print a message."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _take(self, records: list[Followed]) -> None:
        self._rollout.extend(record for record in records if isinstance(record, Rollout))
        if steps := [record for record in records if isinstance(record, Step | Resume)]:
            self._steps = list(chain.from_iterable(sessions([*self._steps, *steps])))[-RECENT_STEPS:]

    def _left(self, step: Step) -> float | None:
        """Estimate the remaining time from the median of recent steps."""
        seconds = median(one.step_seconds for one in self._steps if one.phase == "rl")
        return None if seconds is None else seconds * (self._config.warmup.steps + self._config.run.steps - step.step)

    def _advise(self) -> None:
        advice, *_ = advise([step for step in self._steps if step.phase == "rl"], list(self._rollout))
        remedy = advice.partition(": ")[2]  # the figures before it change at every step
        if remedy and remedy != self._remedy:
            self.say(f"advice: {advice}")
        self._remedy = remedy


def line(step: Step, warmup: int, steps: int, left: float | None = None) -> str:
    """Describe one step in one line of plain text, without missing values: "step 3/10  reward 0.5  left 2 min 05 s"."""
    place = f"warm-up {step.step}/{warmup}" if step.phase == "warmup" else f"step {step.step - warmup}/{steps}"
    parts = [(metric.word, quantity(getattr(step, name), metric.unit)) for name, metric in declared(Step).items() if metric.word]
    shown = [f"{word} {text}" for word, text in [*parts, ("left", duration(left))] if text != ABSENT]
    return "  ".join([place, *shown, *named(step.metrics)])
