"""Parsing of routes and masks in SGLang's responses, built in its documented format."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_trajectory import distinct

from asyncmoe.engines.decode import cut, routed_experts, sampling_masks
from asyncmoe.engines.types import IdLists, VersionSpan
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.platform.sglang.packed_answers import lists
from asyncmoe.trajectory import Routes, Routing, decode_routes, encode_routes
from asyncmoe.trajectory.sent_routes import joined, to_bytes
from tests.unit.generations import generation_of

ROUTING = Routing(all_layers=3, layers=(1, 2), top_k=2, experts=8)


def packed(routes: np.ndarray, start: int = 0, routing: Routing = ROUTING) -> bytes:
    """What an engine says about a sequence one token longer than `routes`."""
    return to_bytes(encode_routes(routes[min(start, len(routes)) :].astype(np.int32), routing, "a response"))


def made(rows: int, routing: Routing = ROUTING) -> np.ndarray:
    return distinct(np.random.default_rng(rows), rows, routing.all_layers, routing.top_k, routing.experts)


def ids(routes: Routes) -> np.ndarray:
    return decode_routes(routes, "g1").transpose(1, 0, 2)


@settings(deadline=None)
@given(turns=st.lists(st.integers(1, 5), min_size=1, max_size=4), top_k=st.integers(1, 8), experts=st.sampled_from((8, 9, 128, 300)))
def test_turns_that_ask_only_for_what_they_lack_add_up(turns: list[int], top_k: int, experts: int) -> None:
    """Every turn's prompt is the whole conversation, and it asks for the rows from the number on that are held."""
    routing = Routing(3, (1, 2), top_k, experts)
    whole, parts, held, seqlen = made(sum(turns), routing), [], 0, 1
    for added in turns:
        seqlen += added
        data = packed(whole[: seqlen - 1], held, routing)
        parts.append(routed_experts(data, routing, tokens=seqlen, routed=held, key="g1"))
        held = seqlen - 1
    got = joined(parts, "g1")
    assert got == encode_routes(whole, routing, "g1")
    np.testing.assert_array_equal(ids(got), whole[:, 1:])


def damaged(at: int) -> bytes:
    whole = bytearray(packed(made(7)))
    whole[at] ^= 1
    return bytes(whole)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (None, "no_routes"),
        (made(7).tobytes(), "routes_malformed"),
        (b"", "routes_malformed"),
        (b"routes_repeated: a response: token 3", "routes_malformed"),
        (packed(made(6)), "length_mismatch"),
        (packed(made(7), start=1), "length_mismatch"),
        (packed(made(7)[:, :2], routing=Routing(2, (1,), 2, 8)), "routes_wrong_layers"),
        (packed(made(7), routing=Routing(3, (1, 2), 2, 9)), "routes_wrong_layers"),
        (packed(made(7), routing=Routing(3, (0, 1), 2, 8)), "routes_wrong_layers"),
        (packed(made(7))[:-1], "routes_malformed"),
        (packed(made(7))[:30], "routes_malformed"),
        (packed(made(7))[:10], "routes_malformed"),
        (packed(made(7)) + b"\0", "routes_malformed"),
        *((damaged(at), "routes_malformed") for at in (4, 8, 12, 16, 20, 28, 36, 40)),
    ],
)
def test_routes_of_another_form_are_refused_by_name(sent: bytes | None, reason: str) -> None:
    with pytest.raises(TrajectoryRejected, match="g1: ") as caught:
        routed_experts(sent, ROUTING, tokens=8, routed=0, key="g1")
    assert caught.value.reason == reason


def test_a_response_that_is_cut_keeps_the_rows_of_its_tokens() -> None:
    response = generation_of(tuple(range(5)), (0.0,) * 5, (VersionSpan("0", 0, 5),), "length", 0, packed(made(9)))
    for keep in range(1, 6):
        kept = cut(response, keep, 5).routes
        assert kept == packed(made(9)[: 4 + keep])


def masks(sent: list[list[int]] | None, size: int) -> list[list[int]]:
    got = sampling_masks(None if sent is None else IdLists(*lists(sent)), size, "g1")
    return [part.tolist() for part in np.split(got.ids, np.cumsum(got.counts)[:-1])] if size else []


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 9), min_size=1).flatmap(lambda s: st.permutations(sorted(s)))))
def test_any_masks_are_sorted(lists: list[list[int]]) -> None:
    assert masks(lists, len(lists)) == [sorted(ids) for ids in lists]


@pytest.mark.parametrize(
    ("lists", "reason", "what"),
    [
        (None, "no_mask", "sent no sampling mask"),
        ([[3]], "length_mismatch", "got masks of 1 tokens, expected 2"),
        ([[3], [5], [6]], "length_mismatch", "got masks of 3 tokens, expected 2"),
        ([[3], []], "mask_without_token", "response token 1: the mask is empty"),
    ],
)
def test_masks_of_another_form_are_refused_by_name(lists: list[list[int]] | None, reason: str, what: str) -> None:
    with pytest.raises(TrajectoryRejected, match=what) as caught:
        masks(lists, 2)
    assert caught.value.reason == reason
