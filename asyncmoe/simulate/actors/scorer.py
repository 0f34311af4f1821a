"""The scorer: scores a bounded number of responses at once; a response that cannot be scored spoils its group."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from asyncmoe.simulate.state import RunState, SimulatedGroup, SimulatedResponse


class SimulatedScorer:
    """The scoring of responses.

    Args:
        reject: receives a group with a response that could not be scored, and the reason.
        scored: receives a group whose responses are all scored.
    """

    def __init__(self, state: RunState, reject: Callable[[SimulatedGroup, str], None], scored: Callable[[SimulatedGroup], None]) -> None:
        self._state, self._reject, self._hand_over = state, reject, scored
        scoring = state.plant.scoring
        self._seconds, self._sigma, self._failure = scoring.seconds, scoring.sigma, state.plant.failures.scoring
        self._most = math.inf if scoring.concurrency is None else scoring.concurrency
        self._waiting: deque[SimulatedResponse] = deque()
        self._running = 0

    def add(self, response: SimulatedResponse) -> None:
        """Score a complete response, as soon as fewer than the plant's maximum are being scored."""
        self._waiting.append(response)
        self._start()

    def _start(self) -> None:
        while self._waiting and self._running < self._most:
            response = self._waiting.popleft()
            if response.group.lost:
                continue
            if not self._seconds:
                self._judge(response.group)
                continue
            self._running += 1
            seconds = self._seconds * self._state.rng.lognormvariate(0.0, self._sigma)
            self._state.clock.after(seconds, lambda group=response.group: self._finish(group))  # type: ignore[misc]  # this iteration's

    def _finish(self, group: SimulatedGroup) -> None:
        self._running -= 1
        if not group.lost:
            self._judge(group)
        self._start()

    def _judge(self, group: SimulatedGroup) -> None:
        if self._failure and self._state.rng.random() < self._failure:
            self._reject(group, "not_scored")
            return
        group.left -= 1
        if not group.left:
            self._hand_over(group)
