"""Whose turn it is on devices that a trainer and its engines share: who may hold which memory, and how the turn passes on. Pure.

    GENERATING --due--> DRAINING --drained--> ASLEEP --granted--> TRAINING --trained--> WAKING --arrived--> GENERATING

    GENERATING  engines sample; the trainer sleeps, or has not started
    DRAINING    engines end what they sample, and release their memory
    ASLEEP      nobody holds memory, except an engine that starts
    TRAINING    the trainer computes; engines sleep
    WAKING      the trainer has only what it sends, engines only memory for weights, and the weights move

Controller and trainer follow the same table: the trainer says which state it waits for, after it has released what that state does not
allow (`HOLDS`), and the controller takes one `step` after another until the state is reached. A process that is lost has given its memory
back by the time its end is known, so only its successor needs a rule. A trainer that starts waits for TRAINING, whatever the state
(`started`). An engine that starts takes all its memory at once, so it may do so only while the trainer holds none (`MAY_START`); if all are
lost when weights are due, the trainer releases its parameters too (`yielded`), until one has started and sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from asyncmoe.errors import InvariantBroken


class DeviceTurn(StrEnum):
    """See the module's docstring."""

    GENERATING = "generating"
    DRAINING = "draining"
    ASLEEP = "asleep"
    TRAINING = "training"
    WAKING = "waking"


class MemoryPart(StrEnum):
    """What may be in a device's memory: of an engine, its weights, and its cache with captured graphs; of the trainer, the parameters that
    it trains, and all else (optimizer state, gradients, activations, weights under adapters)."""

    WEIGHTS = "weights"
    CACHE = "cache"
    PARAMETERS = "parameters"
    STATE = "state"


Held = frozenset[MemoryPart]
ENGINE: Held = frozenset({MemoryPart.WEIGHTS, MemoryPart.CACHE})
TRAINER: Held = frozenset({MemoryPart.PARAMETERS, MemoryPart.STATE})
HOLDS: Mapping[DeviceTurn, Held] = {
    DeviceTurn.GENERATING: ENGINE,
    DeviceTurn.DRAINING: ENGINE,
    DeviceTurn.ASLEEP: frozenset(),
    DeviceTurn.TRAINING: TRAINER,
    DeviceTurn.WAKING: frozenset({MemoryPart.WEIGHTS, MemoryPart.PARAMETERS}),
}
"""What may be held in each state."""
MAY_START = frozenset({DeviceTurn.GENERATING, DeviceTurn.DRAINING, DeviceTurn.ASLEEP})
"""States in which an engine may start."""


class Event(StrEnum):
    """What passes the turn on."""

    DUE = "due"  # the trainer waits for its turn, or to send weights again
    DRAINED = "drained"  # no engine holds memory
    GRANTED = "granted"  # the trainer may compute
    TRAINED = "trained"  # the trainer has only its parameters
    YIELDED = "yielded"  # the trainer has nothing, as no engine is left
    RETURNED = "returned"  # an engine is back, and weights are due
    ARRIVED = "arrived"  # engines have the weights, and the trainer has nothing
    STARTED = "started"  # a trainer starts


TABLE: Mapping[tuple[DeviceTurn, Event], DeviceTurn] = {
    (DeviceTurn.GENERATING, Event.DUE): DeviceTurn.DRAINING,
    (DeviceTurn.DRAINING, Event.DRAINED): DeviceTurn.ASLEEP,
    (DeviceTurn.ASLEEP, Event.GRANTED): DeviceTurn.TRAINING,
    (DeviceTurn.ASLEEP, Event.RETURNED): DeviceTurn.WAKING,
    (DeviceTurn.TRAINING, Event.TRAINED): DeviceTurn.WAKING,
    (DeviceTurn.WAKING, Event.YIELDED): DeviceTurn.ASLEEP,
    (DeviceTurn.WAKING, Event.ARRIVED): DeviceTurn.GENERATING,
    (DeviceTurn.GENERATING, Event.STARTED): DeviceTurn.DRAINING,
    (DeviceTurn.DRAINING, Event.STARTED): DeviceTurn.DRAINING,
    (DeviceTurn.ASLEEP, Event.STARTED): DeviceTurn.ASLEEP,
    (DeviceTurn.TRAINING, Event.STARTED): DeviceTurn.ASLEEP,
    (DeviceTurn.WAKING, Event.STARTED): DeviceTurn.ASLEEP,
}


def after(turn: DeviceTurn, event: Event) -> DeviceTurn:
    """Return the state after an event. Raises InvariantBroken: it is out of turn."""
    if (turn, event) not in TABLE:
        raise InvariantBroken(f"devices in turn: got {event.value} while {turn.value}")
    return TABLE[turn, event]


def step(turn: DeviceTurn, wanted: DeviceTurn, *, engines: int, starting: bool) -> Event | None:
    """Return the event with which the controller comes closer to the state that the trainer waits for. Before it passes the turn on, every
    engine must hold at most what the next state allows, and after that all of it.

    Args:
        engines: number of engines that are present; an engine that is starting is not.
        starting: whether an engine has begun to start.

    Returns:
        None: wait for an engine to start.

    Raises:
        InvariantBroken: the trainer waits for a state that this one does not lead to.
    """
    match turn, wanted:
        case DeviceTurn.GENERATING, DeviceTurn.TRAINING | DeviceTurn.WAKING:
            return Event.DUE
        case DeviceTurn.DRAINING, DeviceTurn.TRAINING | DeviceTurn.WAKING:
            return Event.DRAINED
        case DeviceTurn.ASLEEP, DeviceTurn.TRAINING:
            return None if starting else Event.GRANTED
        case DeviceTurn.ASLEEP, DeviceTurn.WAKING:
            return None if starting or not engines else Event.RETURNED
        case DeviceTurn.TRAINING, DeviceTurn.WAKING:
            return Event.TRAINED
        case DeviceTurn.WAKING, DeviceTurn.GENERATING:
            return Event.ARRIVED
    raise InvariantBroken(f"devices in turn: the trainer waits for {wanted.value} while {turn.value}")
