"""SGLang's answers about routes and masks, made after its documented format, into what is recorded."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_trajectory import distinct

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.engines.decode import routed_experts, sampling_masks
from asyncmoe.trajectory import Routing, decode_masks, decode_routes, encode_masks, encode_routes

ROUTING = Routing(all_layers=3, layers=(1, 2), top_k=2, experts=8)


def answer(routes: np.ndarray, start: int = 0) -> str:
    """What the engine says about a sequence one token longer than `routes`."""
    return base64.b64encode(routes[min(start, len(routes)) :].astype("<i4").tobytes()).decode()


def made(rows: int) -> np.ndarray:
    return distinct(np.random.default_rng(rows), rows, 3, 2, 8)


def test_rows_are_of_all_tokens_but_the_last() -> None:
    routes = made(6)
    got = routed_experts(answer(routes), ROUTING, tokens=7, routed=0, key="g1")
    np.testing.assert_array_equal(got, routes)
    np.testing.assert_array_equal(decode_routes(encode_routes(got, ROUTING, "g1"), "g1"), routes[:, 1:].transpose(1, 0, 2))


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_turns_that_ask_only_for_what_they_lack_add_up(turns: list[int]) -> None:
    """Every turn's prompt is the whole conversation, and it asks for the rows from the number on that are held."""
    whole = made(sum(turns))
    held, seqlen = np.empty((0, 3, 2), np.int32), 1
    for added in turns:
        seqlen += added
        text = answer(whole[: seqlen - 1], start=len(held))
        held = np.concatenate([held, routed_experts(text, ROUTING, tokens=seqlen, routed=len(held), key="g1")])
    np.testing.assert_array_equal(held, whole)


def test_an_answer_without_new_rows() -> None:
    assert routed_experts("", ROUTING, tokens=5, routed=4, key="g1").shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no_routes"),
        ("AAA", "routes_malformed"),
        ("A" * 7 + "*", "routes_malformed"),
        ("é" * 8, "routes_malformed"),
        (answer(made(7)[:, :2]), "routes_wrong_layers"),
        (answer(made(7)[:, :, :1]), "routes_wrong_layers"),
        (answer(made(6)), "length_mismatch"),
        (answer(made(8)), "length_mismatch"),
        (answer(made(7), start=1), "length_mismatch"),
        (base64.b64encode(made(7).tobytes()[:-1]).decode(), "length_mismatch"),
        ("", "length_mismatch"),
    ],
)
def test_routes_of_another_form_are_refused_by_name(text: str | None, reason: str) -> None:
    with pytest.raises(TrajectoryRejected, match="g1: ") as caught:
        routed_experts(text, ROUTING, tokens=8, routed=0, key="g1")
    assert caught.value.reason == reason


def test_more_rows_held_than_there_are_is_refused() -> None:
    with pytest.raises(TrajectoryRejected, match=r"length_mismatch: g1: .* expected -1 rows"):
        routed_experts("", ROUTING, tokens=5, routed=5, key="g1")


def test_a_row_of_minus_one_is_refused_when_it_is_packed() -> None:
    routes = made(7)
    routes[3] = -1
    with pytest.raises(TrajectoryRejected, match="routes_out_of_range: g1: token 3, layer 1, choice 0: got expert -1 of 8"):
        encode_routes(routed_experts(answer(routes), ROUTING, tokens=8, routed=0, key="g1"), ROUTING, "g1")


def masks(lists: list[list[int]] | None, response: list[int], vocabulary: int = 10) -> list[list[int]]:
    got = sampling_masks(lists, np.array(response, np.int32), vocabulary, before=2, after=1, key="g1")
    back = decode_masks(encode_masks(got, "g1"), "g1")
    return [back.ids[a:b].tolist() for a, b in zip(back.offsets[:-1], back.offsets[1:], strict=True)]


def test_masks_are_sorted_and_placed_among_given_tokens() -> None:
    assert masks([[7, 3], [5], [9, 0, 4]], [3, 5, 4]) == [[], [], [3, 7], [5], [0, 4, 9], []]
    assert masks([], []) == [[], [], []]


@settings(deadline=None)
@given(st.lists(st.sets(st.integers(0, 9), min_size=1).flatmap(lambda s: st.permutations(sorted(s)))), st.data())
def test_any_masks(lists: list[list[int]], data: st.DataObject) -> None:
    response = [data.draw(st.sampled_from(ids)) for ids in lists]
    assert masks(lists, response)[2:-1] == [sorted(ids) for ids in lists]


@pytest.mark.parametrize(
    ("lists", "reason", "what"),
    [
        (None, "no_mask", "sent no sampling mask"),
        ([[3]], "length_mismatch", "got masks of 1 tokens, expected 2"),
        ([[3], [5], [6]], "length_mismatch", "got masks of 3 tokens, expected 2"),
        ([[3], []], "mask_without_token", "response token 1: the mask is empty"),
        ([[3], [4, 6]], "mask_without_token", "response token 1: 5 is not among the 2 ids"),
        ([[3], [5, 10]], "bad_mask", "response token 1: id 10 is outside the vocabulary of 10"),
        ([[3, -1], [5]], "bad_mask", "response token 0: id -1 is outside the vocabulary"),
        ([[3], [2**40, 5]], "bad_mask", "response token 1: id 1099511627776 is outside the vocabulary"),
        ([[3], [5, 1, 5]], "bad_mask", "response token 1: id 5 is repeated"),
    ],
)
def test_masks_of_another_form_are_refused_by_name(lists: list[list[int]] | None, reason: str, what: str) -> None:
    with pytest.raises(TrajectoryRejected, match=what) as caught:
        masks(lists, [3, 5])
    assert caught.value.reason == reason
