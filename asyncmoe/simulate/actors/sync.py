"""Weight sync: a version travels while engines generate, then lands: the engines pause, or finish their requests first."""

from __future__ import annotations

from collections.abc import Callable

from asyncmoe.simulate.actors.engines import SimulatedEngines
from asyncmoe.simulate.state import RunState


class SimulatedSync:
    """The transfer of one version at a time.

    Args:
        served: called when the engines serve the version.

    Attributes:
        publishing: True from `publish` until the engines serve the version.
    """

    def __init__(self, state: RunState, engines: SimulatedEngines, served: Callable[[], None]) -> None:
        self._state, self._clock, self._engines, self._served = state, state.clock, engines, served
        self.publishing = False

    def publish(self) -> None:
        """Send the weights of the last step."""
        version, began = self._state.steps, self._clock.now
        self.publishing = True
        self._clock.after(self._state.varied(self._state.plant.sync.seconds), lambda: self._land(version, began))

    def _land(self, version: int, began: float) -> None:
        if self._state.plant.sync.landing == "drain":
            self._engines.drain(lambda: self._pause(version, began))
        else:
            self._pause(version, began)

    def _pause(self, version: int, began: float) -> None:
        self._clock.pause()
        self._clock.after(self._state.varied(self._state.plant.sync.pause_s), lambda: self._serve(version, began))

    def _serve(self, version: int, began: float) -> None:
        self._clock.resume()
        self._state.version = version
        self._engines.land()
        self._state.trace.now.syncing += self._clock.now - began
        self.publishing = False
        self._served()
