"""Engines that come and go, as the live policy advises (`asyncmoe.engines.autoscale`)."""

from __future__ import annotations

from asyncmoe.engines.autoscale import Advice, EngineLoad, Scaling, advise
from asyncmoe.simulate.actors.engines import SimulatedEngines
from asyncmoe.simulate.state import RunState

_LOOK_S = 1.0
"""Seconds between two looks at the queues, as in a run."""


class SimulatedScaling:
    """Starts and ends engines. Without `scaling.first`, all engines serve always.

    Attributes:
        present: engines that serve or start; each costs its GPUs.
    """

    def __init__(self, state: RunState, engines: SimulatedEngines) -> None:
        plant = state.plant
        self._state, self._engines, keys, most = state, engines, plant.scaling, plant.engines.count
        self._advice, self._away = Advice(), list(range(most))[keys.first or most :]
        self._seconds, self._counted_at, self._start_s = 0.0, 0.0, keys.start_s
        self.present = most - len(self._away)
        if keys.first is not None:
            self._scaling = Scaling(min(keys.least, most), most, keys.low, keys.high, keys.patience_s)
            for number in self._away:
                engines.leave(number)
            state.clock.after(_LOOK_S, self._look)

    def engine_seconds(self) -> float:
        """Return the seconds of all engines that were present, added up, until now."""
        now = self._state.clock.now
        self._seconds += self.present * (now - self._counted_at)
        self._counted_at = now
        return self._seconds

    def _look(self) -> None:
        state, engines = self._state, self._engines
        slots = max(1, engines.serving) * state.plant.engines.max_running
        busy = engines.requests / slots
        load = EngineLoad(state.clock.now, state.ledger.queued / state.plant.batch, busy, self.present)
        self._advice = advise(self._advice, load, self._scaling)
        self.engine_seconds()
        if self._advice.engines > self.present:
            number = self._away.pop()
            self.present += 1
            state.clock.after(self._start_s, lambda: engines.join(number))
        elif self._advice.engines < self.present and (gone := engines.leave_one()) is not None:
            self._away.append(gone)
            self.present -= 1
        state.clock.after(_LOOK_S, self._look)
