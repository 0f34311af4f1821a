"""An engine's JSON response, parsed into arrays; and routes, which are valid exactly if they unpack."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_trajectory import distinct

from asyncmoe.engines.sglang.answer import response
from asyncmoe.engines.sglang.streaming import answer
from asyncmoe.engines.types import Generation, VersionSpan
from asyncmoe.errors import EngineError
from asyncmoe.trajectory import _C, Recording, Routing, encode_routes
from tests.unit.example_counts import examples

PLAIN, MASKED = Recording(vocabulary=1 << 20), Recording(masks=True, vocabulary=1 << 20)


numbers = st.floats(-1e300, 0, allow_nan=False)


def reply(tokens: list[int], logprobs: list[Any], routes: bytes | None = None, **more: Any) -> dict[str, Any]:
    """An answer as SGLang makes it."""
    size = len(tokens)
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": size},
        "weight_version": "3",
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        "output_token_logprobs_length": size,
        "cached_tokens": 7,
        "weight_versions": [{"version": "3", "start": 0, "end": size}],
        **({} if routes is None else {"routed_experts": base64.b64encode(routes).decode()}),
        **more,
    }
    return {"output_ids": tokens, "meta_info": meta}


def read(given: dict[str, Any], recording: Recording) -> Generation:
    """The parsed response of a JSON text."""
    return response("e", answer("e", json.dumps(given).encode()), recording)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, (1 << 31) - 1), numbers)), st.binary(max_size=40) | st.none())
def test_any_answer(entries: list[tuple[int, float]], routes: bytes | None) -> None:
    tokens, logprobs = [token for token, _ in entries], [value for _, value in entries]
    lists = [[token, 1, 5][: 1 + token % 3] for token in tokens]
    more = {"output_token_sampling_mask": lists, "output_token_sampling_logprobs": [2.0 * value for value in logprobs]}
    with np.errstate(over="ignore"):
        wanted = np.array(logprobs, np.float64).astype(np.float32), (2.0 * np.array(logprobs, np.float64)).astype(np.float32)
    for recording, values in zip((PLAIN, MASKED), wanted, strict=True):
        got = read(reply(tokens, logprobs, routes, **more), recording)
        assert got.tokens.tolist() == tokens
        assert got.logprobs.tobytes() == values.tobytes()
        assert (got.finish, got.cached_tokens, got.routes) == ("length", 7, routes)
        assert list(got.spans) == [VersionSpan(version="3", start=0, end=len(tokens))]
        assert got.masks.counts.tolist() == list(map(len, lists))


def test_most_probable_ids_are_over_the_mask_from_which_the_token_was_sampled() -> None:
    """0.5, 0.3 and 0.1 of the vocabulary: of the mask {3, 5}, the ids have 0.625 and 0.375; of {4}, the only id has 1."""
    logs = np.log([0.5, 0.3, 0.1]).tolist()
    rows = [[[value, id, None] for value, id in zip(logs, ids, strict=True)] for ids in ((3, 5, 4), (4, 3, 5))]
    masks = {"output_token_sampling_mask": [[5, 3], [4]], "output_token_sampling_logprobs": [np.log(0.375), 0.0]}
    given = reply([5, 4], [logs[1], logs[0]], output_top_logprobs=rows, **masks)
    plain, masked = (read(given, replace(one, top=3)).top for one in (PLAIN, MASKED))
    assert plain["id"].tolist() == masked["id"].tolist() == [[3, 5, 4], [4, 3, 5]]
    np.testing.assert_allclose(np.exp(plain["logprob"]), [[0.5, 0.3, 0.1]] * 2, rtol=1e-6)
    np.testing.assert_allclose(np.exp(masked["logprob"]), [[0.625, 0.375, 0], [1, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("recording", "wrong"),
    [
        (PLAIN, {"output_token_logprobs": [[None, 1, None], [-0.5, 2, None]]}),
        (PLAIN, {"output_token_logprobs": [[-0.5, 1, None], [-0.5, 3, None]]}),
        (PLAIN, {"output_token_logprobs": [[-0.5, 1, None]]}),
        (PLAIN, {"weight_versions": [{"version": "3", "start": 0, "end": 1}]}),
        (PLAIN, {"weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 0, "end": 2}]}),
        (PLAIN, {"finish_reason": {"type": "abort", "message": "out of memory", "status_code": 500}}),
        (MASKED, {}),
        (Recording(top=1), {}),
        (Recording(top=1), {"output_top_logprobs": [[[-0.5, 1, None]]]}),
        (MASKED, {"output_token_sampling_logprobs": [-0.5]}),
    ],
)
def test_parts_that_contradict_each_other(recording: Recording, wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        read(reply([1, 2], [-0.5, -0.25], **wrong), recording)


@pytest.mark.parametrize("wrong", [[[-0.5, 1099511627776, None]], [[-0.5, 1.5, None]], [[-0.5, 1]], None])
def test_what_is_no_answer(wrong: Any) -> None:
    with pytest.raises((ValueError, EngineError)):
        read(reply([1], [-0.5], output_token_logprobs=wrong), PLAIN)


@settings(deadline=None, max_examples=examples(150))
@given(st.integers(0, 70), st.sampled_from([1, 2, 7, 8, 9]), st.sampled_from([9, 16, 100, 128, 129, 256, 300]), st.data())
def test_routes_are_valid_if_they_unpack(rows: int, top_k: int, experts: int, data: st.DataObject) -> None:
    routing = Routing(2, (0, 1), top_k, experts)
    right = encode_routes(distinct(np.random.default_rng(rows), rows, 2, top_k, experts), routing, "k")
    planes = np.frombuffer(right.planes, np.uint8).copy()
    assert _C.routes_valid(planes, rows, top_k, experts, 2)
    if rows:
        for _ in range(data.draw(st.integers(1, 2))):
            planes[data.draw(st.integers(0, len(planes) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert _C.routes_valid(planes, rows, top_k, experts, 2) == (_C.unpack_routes(planes, rows, top_k, experts, 2)[1] == -1)
