"""The rollout workers: each takes in what engines sampled for its groups, one response after the other, at a bounded rate."""

from __future__ import annotations

from collections.abc import Callable

from asyncmoe.simulate.state import RunState, SimulatedResponse


class SimulatedWorkers:
    """The processes between engines and scorer; without a bound on their rate they take no time."""

    def __init__(self, state: RunState) -> None:
        self._clock, workers = state.clock, state.plant.workers
        self._rate, self._free_at = workers.tokens_per_s, [0.0] * workers.count

    def take(self, response: SimulatedResponse, tokens: int, taken: Callable[[SimulatedResponse], None]) -> None:
        """Call `taken` when the worker of the response's group has taken in a turn of so many tokens."""
        if self._rate is None:
            taken(response)
            return
        worker = response.group.number % len(self._free_at)
        self._free_at[worker] = end = max(self._clock.now, self._free_at[worker]) + tokens / self._rate
        self._clock.after(end - self._clock.now, lambda: taken(response))
