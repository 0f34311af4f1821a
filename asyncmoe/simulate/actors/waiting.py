"""The requests that wait for a slot: in the order in which they came, or in that of the live pool's own `Waiting`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from asyncmoe.engines.scheduling import PATIENCE, Lengths, ScheduledRequest, Waiting
from asyncmoe.simulate.plant import Plant
from asyncmoe.simulate.state import SimulatedResponse


class OrderedWaiting:
    """Takes the place of a deque, in an order of the live pool."""

    def __init__(self, waiting: Waiting, lengths: Lengths) -> None:
        self._waiting, self._lengths = waiting, lengths
        self._by_ticket: dict[int, SimulatedResponse] = {}

    def __len__(self) -> int:
        return len(self._by_ticket)

    def append(self, response: SimulatedResponse) -> None:
        """Let a response wait for its next turn."""
        request = ScheduledRequest(str(response.group.number), continues=response.turn > 0)
        self._by_ticket[self._waiting.come(request)] = response

    def extend(self, responses: Iterable[SimulatedResponse]) -> None:
        """Let responses wait for their next turn."""
        for response in responses:
            self.append(response)

    def popleft(self) -> SimulatedResponse:
        """Remove and return the next one; at least one must be waiting."""
        return self._by_ticket.pop(self._waiting.take())

    def learn(self, response: SimulatedResponse) -> None:
        """Note the length of a turn that is complete, as the pool does."""
        self._lengths.note(str(response.group.number), response.turns[response.turn])


def waiting_of(plant: Plant) -> deque[SimulatedResponse] | OrderedWaiting:
    """Return an empty line in the order of the plant."""
    order, slots = plant.engines.order, plant.engines.count * plant.engines.max_running
    if order == "arrival":
        return deque()
    lengths = Lengths()
    return OrderedWaiting(Waiting(order, PATIENCE * slots, lengths), lengths)
