"""The nodes of an engine join, gather and end together: the controller's decisions and its replies to each node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmoe.engines import gathering
from asyncmoe.engines.gathering import Gatherings, NodeGathering, arrive, silent
from asyncmoe.errors import UserError
from asyncmoe.rpc.messages import EngineJoin
from asyncmoe.rpc.node_messages import EngineNode, EngineNodes

LIMIT_S = 10.0
PLACE = "tcp://10.0.0.1:29500"


def node(number: int, start: str = "", nodes: int = 2, **changed: Any) -> EngineNode:
    """A requesting node; its start is its number by default."""
    values = {"host": f"h{number}", "who": f"n{number}", "meeting": "" if number else PLACE, "met": "", "wait_s": 0.0, "config_digest": ""}
    return EngineNode("engine.a", number, nodes, start or str(number), **{**values, **changed})


def came(*asked: EngineNode, at: float = 0.0) -> NodeGathering:
    found: NodeGathering | None = None
    for one in asked:
        found = arrive(found, one, at, LIMIT_S)
    return found


@given(st.integers(2, 6).flatmap(lambda nodes: st.permutations(range(nodes))))
def test_they_meet_where_node_0_says_in_whatever_order_they_come(order: Sequence[int]) -> None:
    for count in range(1, len(order) + 1):
        found = came(*(node(number, nodes=len(order)) for number in order[:count]))
        assert found.missing == tuple(sorted(set(range(len(order))) - set(order[:count])))
        assert (not found.missing) == (count == len(order))
    assert found.meeting == PLACE


def test_a_place_is_taken_until_its_node_is_silent_and_for_good_once_all_have_met() -> None:
    waiting = came(node(1))
    with pytest.raises(UserError, match=r"node 1 of engine engine\.a: got a second one on n1, .* start again in 0 s if"):
        arrive(waiting, node(1, "other"), LIMIT_S, LIMIT_S)
    later = arrive(waiting, node(1, "other"), LIMIT_S + 1, LIMIT_S)
    assert {number: seat.start for number, seat in later.seats.items()} == {1: "other"}
    with pytest.raises(UserError, match="node 1 of engine"):
        arrive(came(node(0), node(1)), node(1, "other"), 100 * LIMIT_S, LIMIT_S)


def test_nodes_that_cannot_be_of_one_engine_are_refused() -> None:
    with pytest.raises(UserError, match=r"engines\.nodes of engine\.a on n1: got 3, expected 2, as on its first node"):
        came(node(0), node(1, nodes=3))
    with pytest.raises(UserError, match=r"node of engine engine\.a: got 2, expected less than engines\.nodes = 2"):
        came(node(2))


def test_silence_counts_once_they_have_met() -> None:
    assert not silent(came(node(0)), 100 * LIMIT_S, LIMIT_S)
    met = came(node(0), node(1))
    assert not silent(met, LIMIT_S, LIMIT_S)
    heard = arrive(met, node(0), LIMIT_S, LIMIT_S)
    assert silent(heard, LIMIT_S + 1, LIMIT_S) == "node 1 on n1: no heartbeat for 11 s (cluster.heartbeat_timeout_s 10)"


def told(gatherings: Gatherings, *asked: EngineNode) -> list[EngineNodes]:
    async def ask() -> list[EngineNodes]:
        return [await gatherings.ask(one) for one in asked]

    return asyncio.run(ask())


def join(gatherings: Gatherings, request: EngineJoin) -> str:
    """As the controller does when an engine joins."""
    why = gatherings.join(request)
    if not why:
        gatherings.joined(request.name)
    return why


def joining(**changed: Any) -> EngineJoin:
    return EngineJoin("engine.a", "http://10.0.0.1:1", "key", "h0+h1", 2, 1, "", **{"nodes": 2, "met": PLACE, **changed})


def test_all_hear_where_they_meet_and_that_one_is_lost() -> None:
    gatherings = Gatherings(LIMIT_S, "c")
    early, last, first = told(gatherings, node(1), node(0), node(1))
    assert (early.meeting, early.missing, early.is_order) == ("", (0,), False)
    assert last == first == EngineNodes(PLACE, ("h0", "h1"), (), "c")
    assert not join(gatherings, joining())
    assert not gatherings.lost("engine.a", PLACE)
    assert gatherings.end_start("engine.a", "1", "out of memory")
    assert gatherings.lost("engine.a", PLACE) == "node 1 on n1: out of memory"
    (order,) = told(gatherings, node(0, met=PLACE))
    assert order == EngineNodes(why="node 1 on n1: out of memory", again=True)
    assert join(gatherings, joining()) == "engine.a: one of its nodes was lost before it could join"
    anew, late = told(gatherings, node(1, "1b"), node(0, met=PLACE))
    assert (anew.missing, late.why) == ((0,), "node 1 on n1: out of memory")
    assert told(gatherings, node(0, "0b"))[0].meeting == PLACE


def test_an_engine_that_has_not_joined_does_not_start_again() -> None:
    gatherings = Gatherings(LIMIT_S, "")
    told(gatherings, node(0), node(1))
    assert not gatherings.join(joining())  # but the controller cannot reach it
    gatherings.end_start("engine.a", "1", "no such model")
    assert told(gatherings, node(0, met=PLACE)) == [EngineNodes(why="node 1 on n1: no such model")]


def test_one_that_gives_up_waiting_frees_its_place() -> None:
    gatherings = Gatherings(LIMIT_S, "")
    told(gatherings, node(0))
    assert gatherings.end_start("engine.a", "0", "it has waited long enough")
    assert not gatherings.end_start("engine.a", "0", "again")
    assert told(gatherings, node(1), node(0, "0b"))[1].meeting == PLACE
    assert told(gatherings, node(0))[0].is_order


def test_silence_ends_them_all_though_the_controller_itself_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    gatherings, now = Gatherings(LIMIT_S, ""), [gathering.time.monotonic()]
    monkeypatch.setattr(gathering.time, "monotonic", lambda: now[0])
    told(gatherings, node(0), node(1))
    join(gatherings, joining())
    now[0] += 100 * LIMIT_S
    assert not gatherings.lost("engine.a", PLACE), "what they have said wait to be read"
    for _ in range(int(LIMIT_S) + 1):
        now[0] += 1.0
        gatherings.lost("engine.a", PLACE)
        told(gatherings, node(0, met=PLACE))
    (order,) = told(gatherings, node(0, met=PLACE))
    assert order.again
    assert order.why.startswith("node 1 on n1: no heartbeat for 1")
