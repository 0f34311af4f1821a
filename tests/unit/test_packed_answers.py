"""A packed response equals SGLang's JSON, bit for bit, and a damaged one is refused; tests/engine tests a real engine's."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_record_answer import MASKED, PLAIN, numbers, read, reply

from asyncmoe.engines.sglang.answer import packed_answer, response
from asyncmoe.engines.types import Generation
from asyncmoe.errors import EngineError
from asyncmoe.platform.sglang.packed_answers import packed
from tests.unit.example_counts import examples

REFUSED = (ValueError, RecursionError, EngineError)


def whole(answer: Mapping[str, Any]) -> bytes:
    return packed(answer, base64.b64decode)


def as_plain(given: Generation) -> list[Any]:
    routes = None if given.routes is None else bytes(given.routes)
    arrays = given.tokens, given.logprobs, *(() if given.masks is None else (given.masks.counts, given.masks.ids)), given.top
    return [
        given.spans,
        given.finish,
        given.cached_tokens,
        routes,
        *((array.dtype.str, array.tobytes()) for array in arrays if array is not None),
    ]


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.tuples(st.integers(0, (1 << 31) - 1), numbers)), st.binary(max_size=40) | st.none(), st.booleans())
def test_any_answer(entries: list[tuple[int, float]], routes: bytes | None, masked: bool) -> None:
    tokens, logprobs = [token for token, _ in entries], [value for _, value in entries]
    more: dict[str, Any] = {}
    if masked:
        masks = [[token, 1, 5][: 1 + token % 3] for token in tokens]
        more = {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": logprobs}
    more["output_top_logprobs"] = [[[value, token, None], [value, 7, None]] for token, value in entries]
    answer, recording = reply(tokens, logprobs, routes, **more), replace(MASKED if masked else PLAIN, top=2)
    with np.errstate(over="ignore", invalid="ignore"):
        assert as_plain(response("e", packed_answer(whole(answer)), recording)) == as_plain(read(answer, recording))


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([reply([1], [-0.5])], id="several answers"),
        pytest.param({"output_ids": [1]}, id="an answer without log-probabilities"),
        pytest.param(reply([1 << 40], [-0.5]), id="a token of 41 bits"),
        pytest.param(reply([1], [-0.5], output_token_logprobs=[[-0.5, 2, None]]), id="another token"),
        pytest.param(reply([1], [-0.5], output_token_logprobs=[]), id="too few log-probabilities"),
        pytest.param(reply([1], [-0.5], output_token_sampling_mask=[None]), id="no mask"),
        pytest.param(reply([1], [-0.5], routed_experts="A?=="), id="routes in another form"),
        pytest.param(reply([1], [-0.5], finish_reason={1j: 2}), id="what JSON has no form for"),
    ],
)
def test_what_does_not_fit_together_is_sent_as_it_is(answer: Any) -> None:
    assert packed(answer, base64.b64decode) is None


def test_a_log_probability_that_is_no_number_is_refused() -> None:
    for value in (None, float("nan")):
        with pytest.raises(EngineError, match="got a log-probability that is not a number"):
            response("e", packed_answer(whole(reply([1], [value]))), PLAIN)


def test_damaged_answers() -> None:
    """Cut anywhere, or with bytes of any value anywhere, an answer is refused or is an answer of consistent sizes."""
    random = Random(0)
    more = {"output_token_sampling_mask": [[1, 2], [2, 70000, 3]], "output_token_sampling_logprobs": [-0.125, -1.25e-5]}
    more["output_top_logprobs"] = [[[-0.5, 1, None]], [[-0.25, 3, None]]]
    body = whole(reply([1, 2], [-0.5, -2.25], b"routes", **more))
    for size in range(len(body)):
        with pytest.raises(REFUSED):
            packed_answer(body[:size])
    with pytest.raises(ValueError, match="got 1 bytes after the last part"):
        packed_answer(body + b"x")
    taken = 0
    for _ in range(2000):
        damaged = bytearray(body)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] = random.choice([*b'0123456789,[]{}"nul ', random.randrange(256)])
        try:
            made = packed_answer(damaged)
        except REFUSED:
            continue
        taken += 1
        assert len(made.tokens) == len(made.logprobs)
        assert made.masks is None or made.masks.counts.sum() == len(made.masks.ids)
    assert 0 < taken < 2000
