"""Devices in turn: every order of events and losses of a trainer, its engines and a controller that follow `asyncmoe.occupancy`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from asyncmoe.errors import InvariantBroken
from asyncmoe.occupancy import ENGINE, HOLDS, MAY_START, TABLE, TRAINER, DeviceTurn, Event, Held, MemoryPart, after, step

NOTHING: Held = frozenset()
PARAMETERS: Held = frozenset({MemoryPart.PARAMETERS})
LOSSES = 3


@dataclass(frozen=True)
class Server:
    """An engine's process. `fresh`: it has the trainer's newest weights."""

    state: Literal["lost", "starting", "present"] = "lost"
    holds: Held = NOTHING
    fresh: bool = False


@dataclass(frozen=True)
class World:
    """`wanted`: what the trainer waits for; None: it works. `due`: it has trained, and engines lack its weights."""

    turn: DeviceTurn = DeviceTurn.GENERATING
    trainer: Held | None = None
    wanted: DeviceTurn | None = None
    due: bool = False
    servers: tuple[Server, Server] = (Server(), Server())
    losses: int = 0

    def changed(self, at: int, server: Server) -> World:
        return replace(self, servers=tuple(server if i == at else one for i, one in enumerate(self.servers)))


def following(world: World) -> Iterator[World]:
    """Yield what may happen next."""
    yield from _losses(world)
    for at, one in enumerate(world.servers):
        if one.state == "lost" and world.turn in MAY_START:
            yield world.changed(at, Server("starting", ENGINE))
        if one.state == "starting":  # it joins, and is brought to what the state allows
            yield world.changed(at, Server("present", HOLDS[world.turn] & ENGINE))
    if world.trainer is None:
        yield _started(replace(world, trainer=NOTHING, wanted=DeviceTurn.TRAINING))
    elif world.wanted is not None:
        yield from _controller(world, world.wanted)
    else:
        yield from _trainer(world, world.trainer)


def _losses(world: World) -> Iterator[World]:
    if world.losses == LOSSES:
        return
    lost = replace(world, losses=world.losses + 1)
    if world.trainer is not None:
        yield replace(lost, trainer=None, wanted=None)
    for at, one in enumerate(world.servers):
        if one.state != "lost":
            yield lost.changed(at, Server())
    # A controller takes the trainer with it, and its successor lets engines that may hold other weights start again.
    yield replace(lost, turn=DeviceTurn.GENERATING, trainer=None, wanted=None, servers=(Server(), Server()))


def _started(world: World) -> World:
    return _passed(world, Event.STARTED)


def _passed(world: World, event: Event) -> World:
    """Pass the turn on, as the controller does: engines that are present release what the next state forbids, then take what it allows."""
    turn = after(world.turn, event)
    if turn is not DeviceTurn.DRAINING:
        held = HOLDS[turn] & ENGINE
        world = replace(
            world,
            servers=tuple(
                one if one.state != "present" else replace(one, holds=held, fresh=one.fresh and MemoryPart.WEIGHTS in one.holds)
                for one in world.servers
            ),
        )
    return replace(world, turn=turn)


def _controller(world: World, wanted: DeviceTurn) -> Iterator[World]:
    if world.turn is wanted:
        loads = HOLDS[wanted] & TRAINER
        yield replace(world, wanted=None, trainer=loads)
        return
    states = [one.state for one in world.servers]
    found = step(world.turn, wanted, engines=states.count("present"), starting="starting" in states)
    if found is not None:
        yield _passed(world, found)


def _trainer(world: World, holds: Held) -> Iterator[World]:
    if world.turn is DeviceTurn.TRAINING:
        yield replace(world, trainer=PARAMETERS, wanted=DeviceTurn.WAKING, due=True)
    elif world.turn is DeviceTurn.WAKING:
        sent = [replace(one, fresh=True) if one.state == "present" else one for one in world.servers]
        served = any(one.fresh for one in sent)
        wanted = DeviceTurn.GENERATING if served else DeviceTurn.WAKING
        if served:
            yield replace(world, servers=tuple(sent), trainer=NOTHING, wanted=wanted, due=False)
        else:
            yield _passed(replace(world, trainer=NOTHING, wanted=wanted), Event.YIELDED)
    elif world.turn is DeviceTurn.GENERATING:
        serves = any(one.fresh and one.state == "present" for one in world.servers)
        if serves:
            yield replace(world, wanted=DeviceTurn.TRAINING)  # its batch is complete
        elif any(one.state == "present" for one in world.servers):
            yield replace(world, wanted=DeviceTurn.WAKING)  # no engine has the version any more


def allowed(world: World) -> bool:
    """Return whether what is really held fits on the devices."""
    trainer = world.trainer or NOTHING
    return all(not (one.holds and trainer) or (one.holds <= {MemoryPart.WEIGHTS} and trainer <= PARAMETERS) for one in world.servers)


def test_no_order_of_events_and_losses_holds_too_much_or_ends() -> None:
    begin = World()
    seen, after_of, todo = {begin}, dict[World, list[World]](), deque([begin])
    while todo:
        world = todo.popleft()
        assert allowed(world), world
        after_of[world] = list(following(world))
        for one in after_of[world]:
            if one not in seen:
                seen.add(one)
                todo.append(one)
    assert {world.turn for world in seen} == {*DeviceTurn}
    trained = {world for world in seen if world.turn is DeviceTurn.TRAINING and world.wanted is None}
    reaches, before = set(trained), dict[World, list[World]]()
    for world, all_next in after_of.items():
        for one in all_next:
            if one.losses == world.losses:  # without a further loss
                before.setdefault(one, []).append(world)
    queue = deque(trained)
    while queue:
        for one in before.get(queue.popleft(), ()):
            if one not in reaches:
                reaches.add(one)
                queue.append(one)
    assert not seen - reaches, next(iter(seen - reaches))


@pytest.mark.parametrize("turn", DeviceTurn)
@pytest.mark.parametrize("event", Event)
def test_an_event_out_of_turn_is_refused(turn: DeviceTurn, event: Event) -> None:
    if (turn, event) in TABLE:
        assert after(turn, event) is TABLE[turn, event]
    else:
        with pytest.raises(InvariantBroken):
            after(turn, event)
