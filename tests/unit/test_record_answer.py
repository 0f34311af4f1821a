"""An engine's answer read into arrays is, bit for bit, what msgspec reads into Python's numbers; and nothing else is accepted."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_trajectory import distinct

from asyncmoe.engines.sglang.answer import answer, response
from asyncmoe.engines.types import Generation, VersionSpan
from asyncmoe.errors import EngineError
from asyncmoe.trajectory import _C, Recording, Routing, encode_routes
from asyncmoe.trajectory.native import read_floats
from asyncmoe.trajectory.sent_routes import to_bytes
from tests.unit.example_counts import examples

ROUTING = Routing(all_layers=3, layers=(0, 1, 2), top_k=8, experts=20)
PLAIN, MASKED = Recording(vocabulary=1 << 20), Recording(masks=True, vocabulary=1 << 20)


class Finish(msgspec.Struct, frozen=True):
    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct, frozen=True):
    finish_reason: Finish
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    weight_versions: list[VersionSpan]
    cached_tokens: int = 0
    routed_experts: bytes | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class Generated(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: Meta


def by_msgspec(body: bytes, recording: Recording) -> Generation:
    """The oracle: every number an object of Python's.

    Raises:
        ValueError, RecursionError, OverflowError: no such answer.
        EngineError: its parts contradict each other.
    """
    whole = msgspec.json.decode(body, type=Generated)
    meta, tokens = whole.meta_info, tuple(whole.output_ids)
    if meta.finish_reason.type == "abort" and meta.finish_reason.status_code is not None:
        raise EngineError("aborted")
    logprobs = tuple(entry[0] for entry in meta.output_token_logprobs)
    if tuple(entry[1] for entry in meta.output_token_logprobs) != tokens or None in logprobs:
        raise EngineError("tokens")
    ends = [span.end for span in meta.weight_versions]
    if [span.start for span in meta.weight_versions] != [0, *ends[:-1]] or ends[-1:] != [len(tokens)]:
        raise EngineError("spans")
    values: tuple[Any, ...] = logprobs
    if recording.masks:
        values = tuple(meta.output_token_sampling_logprobs or ())
        if len(values) != len(tokens):
            raise EngineError("masks")
    parts = tuple(meta.weight_versions), meta.finish_reason.type, meta.cached_tokens, meta.routed_experts, meta.output_token_sampling_mask
    with np.errstate(over="ignore"):
        return Generation.of(tokens, values, *parts)


def plain(g: Generation) -> list[Any]:
    arrays = g.tokens, g.logprobs, *(() if g.masks is None else (g.masks.counts, g.masks.ids))
    return [g.spans, g.finish, g.cached_tokens, g.routes, *((a.dtype.str, a.tobytes()) for a in arrays)]


def expect_same(body: bytes, recording: Recording) -> bool:
    """Both readers accept the answer and agree on it, or both refuse it; return whether they accept it."""
    refused = ValueError, RecursionError, OverflowError, EngineError
    try:
        wanted = by_msgspec(body, recording)
    except refused:
        with pytest.raises(refused):
            response("e", answer(body), recording)
        return False
    assert plain(response("e", answer(body), recording)) == plain(wanted)
    return True


def reply(tokens: list[int], logprobs: list[Any], routes: bytes | None = None, **more: Any) -> dict[str, Any]:
    """An answer as SGLang sends it."""
    size = len(tokens)
    meta = {
        "id": "r",
        "finish_reason": {"type": "length", "length": size},
        "weight_version": "3",
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        "cached_tokens": 7,
        "weight_versions": [{"version": "3", "start": 0, "end": size}],
        **({} if routes is None else {"routed_experts": base64.b64encode(routes).decode()}),
        **more,
    }
    return {"output_ids": tokens, "meta_info": meta}


def rendered(value: Any, spaces: bool) -> bytes:
    return json.dumps(value, separators=(", ", ": ") if spaces else (",", ":"), indent=1 if spaces else None).encode()


numbers = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.floats(-20, 0, width=32), st.just(-0.0), st.floats(-1e-44, 0))
junk = st.recursive(st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3))


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.tuples(st.integers(0, (1 << 31) - 1), numbers)), st.binary(max_size=40) | st.none(), junk, st.booleans())
def test_any_answer(entries: list[tuple[int, float]], routes: bytes | None, other: Any, spaces: bool) -> None:
    tokens, logprobs = [token for token, _ in entries], [value for _, value in entries]
    assert expect_same(rendered(reply(tokens, logprobs, routes, other=other), spaces), PLAIN)
    masks = [[token, 1, 5][: 1 + token % 3] for token in tokens]
    more = {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": logprobs}
    assert expect_same(rendered(reply(tokens, logprobs, routes, **more), spaces), MASKED)


ODD: dict[str, str] = {
    "a null log-probability": '"output_token_logprobs":[[null,1,null],[-0.5,2,null]]',
    "a text of a token": '"output_token_logprobs":[[-0.25,1,"a\\n\\u00e9"],[-0.5,2,null]]',
    "tiny and huge numbers": '"output_token_logprobs":[[-1e-400,1,null],[-1e300,2,null]]',
    "numbers with very many digits": f'"output_token_logprobs":[[-0.{"3" * 900},1,null],[-{"1" * 30}.5e-29,2,null]]',
    "NaN": '"output_token_logprobs":[[NaN,1,null],[-0.5,2,null]]',
    "leading zeros": '"output_token_logprobs":[[-00.5,1,null],[-0.5,2,null]]',
    "a short entry": '"output_token_logprobs":[[-0.5,1],[-0.5,2,null]]',
    "nothing": '"output_token_logprobs":null',
    "other tokens": '"output_token_logprobs":[[-0.5,1,null],[-0.5,3,null]]',
    "a token with a fraction": '"output_token_logprobs":[[-0.5,1.5,null],[-0.5,2,null]]',
    "a token of 40 bits": '"output_token_logprobs":[[-0.5,1099511627776,null],[-0.5,2,null]]',
    "given twice": '"output_token_logprobs":[[-0.5,9,null]],"output_token_logprobs":[[-0.5,1,null],[-0.25,2,null]]',
    "a comma too many": '"output_token_logprobs":[[-0.5,1,null],[-0.5,2,null],]',
    "escapes in base64": '"routed_experts":"\\u0041\\/8="',
    "base64 without padding": '"routed_experts":"AAE"',
    "padding in the middle": '"routed_experts":"AA==AAAA"',
    "bits after the last byte": '"routed_experts":"AB=="',
    "no routes": '"routed_experts":null',
}


@pytest.mark.parametrize("odd", list(ODD))
def test_an_odd_answer_is_taken_or_refused_as_msgspec_does(odd: str) -> None:
    rest = rendered(reply([1, 2], [-0.5, -0.25])["meta_info"], spaces=False).decode()[1:-1]
    expect_same(f'{{"output_ids":[1,2],"meta_info":{{{rest},{ODD[odd]}}}}}'.encode(), PLAIN)


def test_damaged_answers() -> None:
    """Cut anywhere, or with bytes of any value anywhere."""
    random = Random(0)
    routes = to_bytes(encode_routes(distinct(np.random.default_rng(0), 6, 3, 8, 20), ROUTING, "k"))
    more = {"output_token_sampling_mask": [[1, 2], [2, 70000]], "output_token_sampling_logprobs": [-0.125, -1.25e-5]}
    whole = rendered(reply([1, 2], [-0.5, -2.25], routes, **more), spaces=False)
    accepted = [expect_same(whole[:size], MASKED) for size in range(len(whole))]
    assert not any(accepted)
    taken = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] = random.choice([*b'0123456789.eE+-[]{},:"=nul \\', random.randrange(256)])
        taken += expect_same(bytes(damaged), MASKED)
    assert 0 < taken < 2000


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(st.integers(1, 10**19).flatmap(lambda n: st.integers(-60, 30).map(lambda e: f"-{n}e{e}")), min_size=1))
def test_decimals_are_rounded_as_python_and_numpy_round_them(texts: list[str]) -> None:
    found = read_floats(f"[{','.join(texts)}]".encode())
    with np.errstate(over="ignore"):
        wanted = np.array([float(text) for text in texts]).astype(np.float32)
    if np.isfinite(wanted).all():
        assert found is not None
        assert found.tobytes() == wanted.tobytes()
    else:
        assert found is None


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
