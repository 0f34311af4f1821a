"""The requests that wait for a slot: in the order in which they came, or in that of the live pool's own `Waiting`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from asyncmoe.rollout.engines.scheduling import PATIENCE, Lengths, ScheduledRequest, Waiting
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.state import SimulatedResponse


class SimulatedWaiting:
    """See the module; the order is the plant's."""

    def __init__(self, plant: Plant) -> None:
        order, slots = plant.engines.order, plant.engines.count * plant.engines.max_running
        self._lengths = Lengths()
        self._ordered = None if order == "arrival" else Waiting(order, PATIENCE * slots, self._lengths)
        self._came: deque[SimulatedResponse] = deque()
        self._by_ticket: dict[int, SimulatedResponse] = {}

    def __len__(self) -> int:
        return len(self._came) + len(self._by_ticket)

    def add(self, responses: Iterable[SimulatedResponse]) -> None:
        """Let responses wait for their next turn."""
        if self._ordered is None:
            self._came.extend(responses)
            return
        for response in responses:
            request = ScheduledRequest(str(response.group.number), continues=response.turn > 0)
            self._by_ticket[self._ordered.come(request)] = response

    def take(self) -> SimulatedResponse:
        """Remove and return the next one; at least one must be waiting."""
        return self._came.popleft() if self._ordered is None else self._by_ticket.pop(self._ordered.take())

    def learn(self, response: SimulatedResponse) -> None:
        """Note the length of a turn that is complete, as the pool does."""
        if self._ordered is not None:
            self._lengths.note(str(response.group.number), response.turns[response.turn])
