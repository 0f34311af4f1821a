"""Texts that end a response: nothing sampled changes, and nothing after the end is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.engines.decode import cut
from asyncmoe.engines.sglang.answer import response
from asyncmoe.engines.sglang.client import SGLangClient
from asyncmoe.engines.sglang.streaming import Parts, StreamPart
from asyncmoe.engines.types import ABORTED, Generation, Sampling, VersionSpan
from asyncmoe.errors import EngineError, TrajectoryRejected
from asyncmoe.models.make import VOCAB
from asyncmoe.rollout.episodes.interruption import respond
from asyncmoe.rollout.episodes.listening import Listening
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import Recording
from tests.unit import openai_policy
from tests.unit.example_counts import examples
from tests.unit.generations import generation_of
from tests.unit.openai_policy import Policy
from tests.unit.test_interruption import Scripted


@settings(max_examples=examples(150))
@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=40),
    st.lists(st.text("ab<1 é", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_the_first_token_that_completes_a_text_is_the_last(known: Tokenizer, tokens: list[int], stops: list[str], chunk: int) -> None:
    listening = Listening(known, stops)
    ended = any(listening.hear(tokens[at : at + chunk]) for at in range(0, len(tokens), chunk))
    texts = [known.decode(tokens[: n + 1]) for n in range(len(tokens))]
    expected = next((n + 1 for n, text in enumerate(texts) if any(stop in text for stop in stops)), None)
    assert (listening.kept, ended) == (expected, expected is not None)
    assert (listening.stopped_by is None) == (expected is None)


def ask(known: Tokenizer, words: str, **how: Any) -> tuple[Any, Policy]:
    policy = Policy(openai_policy.text(known, words))

    async def run() -> Any:
        agent = policy.episode(known).agent()
        agent.see("?")
        return await agent.respond(**how)

    return asyncio.run(run()), policy


@pytest.mark.parametrize("stop", [("]",), "]", ["no", "+7]"]])
def test_a_response_ends_with_the_token_that_completes_the_text(known: Tokenizer, stop: Any) -> None:
    response, _ = ask(known, "[12+7] and more", stop=stop)
    assert (response.text, response.finish, response.stopped_by) == ("[12+7]", "stop", list(stop)[-1])
    assert response.tokens == known.encode("[12+7]")
    assert response.logprobs == (-0.5,) * len(response.tokens)


@pytest.mark.parametrize("stop", [7, [1.5], [True], [-1], [VOCAB], [""], ["x" * 1001], ["x"] * 33])
def test_stops_that_are_neither_are_refused_at_the_call(known: Tokenizer, stop: Any) -> None:
    with pytest.raises(TrajectoryRejected, match="respond: got stop"):
        ask(known, "hello", stop=stop)


def generation(routes: bytes | None = None) -> Generation:
    spans = (VersionSpan("3", 0, 2), VersionSpan("4", 2, 5))
    return generation_of((10, 11, 12, 13, 14), (-1.0, -2.0, -3.0, -4.0, -5.0), spans, ABORTED, 0, routes, [[n] for n in range(10, 15)])


def test_a_response_that_is_cut_is_one_that_ended_there() -> None:
    """Its routes: test_rollout_sampled.py."""
    made = cut(generation(), 2, 5)
    assert (made.tokens.tolist(), made.logprobs.tolist(), made.finish) == ([10, 11], [-1.0, -2.0], "stop")
    assert (made.masks.counts.tolist(), made.masks.ids.tolist()) == ([1, 1], [10, 11])
    assert made.spans == (VersionSpan("3", 0, 2),)
    assert cut(generation(), 3, 5).spans == (VersionSpan("3", 0, 2), VersionSpan("4", 2, 3))
    for malformed in (b"?", b"AAAA", b"amr1", b""):
        assert cut(generation(malformed), 2, 5).routes == malformed


@pytest.mark.parametrize(("how", "lost"), [("abort_resume", 2), ("abort_retry", 6)])
def test_a_text_ends_a_response_that_was_interrupted(known: Tokenizer, how: Any, lost: int) -> None:
    """The third token of the second answer ends it; that answer has five."""

    class Ends(Listening):
        def _ends(self, piece: str) -> bool:
            return self._tokens[-1] == 202

        def _piece(self) -> str:
            return "?"

    listener = Ends(known, ["x"])
    pool: Any = Scripted((4, ABORTED), (5, ABORTED))
    turns = asyncio.run(respond(pool, (1, 2, 3), [], Sampling(1.0, 20, ()), how, listener=listener))
    assert turns[-1].generation.tokens.tolist() == [200, 201, 202]
    assert turns[-1].generation.finish == "stop"
    assert pool.lost_tokens == lost
    assert listener.live == (how == "abort_resume")


def part(ids: Sequence[int], total: int, **more: object) -> bytes:
    logprobs = [(-1.0, one, None) for one in ids]
    meta = {"output_token_logprobs": logprobs, "output_token_logprobs_length": total, "finish_reason": None, **more}
    return b"data: " + msgspec.json.encode({"output_ids": list(ids), "meta_info": meta}) + b"\n\n"


END = {"finish_reason": {"type": "length"}, "weight_versions": [{"version": "0", "start": 0, "end": 3}]}


def streamed(known: Tokenizer, pieces: Sequence[bytes], stops: Sequence[str] = ("never",)) -> tuple[Generation, list[Any], Listening]:
    """What the client makes of an engine that streams these bytes."""
    bodies: list[Any] = []
    listening = Listening(known, stops)

    class Client(SGLangClient):
        async def _stream(self, path: str, body: Any, seconds: float) -> AsyncGenerator[bytes]:
            bodies.append(body)
            for piece in pieces:
                yield piece

        async def _send(self, path: str, body: Any, timeout_s: float | None = None) -> bytes:
            bodies.append(body)
            return b"{}"

    async def run() -> Generation:
        return await Client("engine.0", "http://nowhere").generate((1, 2), Sampling(1.0, 8, ()), "0", 5.0, listener=listening)

    return asyncio.run(run()), bodies, listening


def test_parts_of_an_answer_are_put_together_whatever_packets_they_come_in(known: Tokenizer) -> None:
    a, b, c = known.encode("abc")
    whole = part([a], 1) + part([b, c], 3, **END) + b"data: [DONE]\n\n"
    for size in (1, 7, len(whole)):
        made, bodies, listening = streamed(known, [whole[at : at + size] for at in range(0, len(whole), size)])
        assert (made.tokens.tolist(), made.logprobs.tolist(), made.finish, listening.kept) == ([a, b, c], [-1.0] * 3, "length", None)
        assert bodies[0]["stream"] is True
        assert len(bodies) == 1


def test_the_request_is_aborted_once_a_text_has_ended_it(known: Tokenizer) -> None:
    a, b, c = known.encode("abc")
    end = {**END, "finish_reason": {"type": "abort", "message": "Abort"}}
    made, bodies, listening = streamed(known, [part([a], 1), part([b], 2), part([c], 3, **end)], ["b"])
    assert (made.tokens.tolist(), listening.kept) == ([a, b, c], 2)
    assert bodies[1] == {"rid": bodies[0]["rid"], "abort_all": False}
    assert len(bodies) == 2


def test_a_request_that_is_aborted_in_the_queue_repeats_itself(known: Tokenizer) -> None:
    a, b, c = known.encode("abc")
    last = part([a, b, c], 3, **END).replace(msgspec.json.encode([a, b, c]), msgspec.json.encode([c]), 1)
    assert b'"output_ids":[%d],' % c in last
    made, _, _ = streamed(known, [part([a, b], 2), last])
    assert made.tokens.tolist() == [a, b, c]

    rows, parts = [[[-0.5, a, None]], [[-0.25, b, None]], [[-0.75, c, None]]], Parts("e")
    for piece in (part([a, b], 2, output_top_logprobs=rows[:2]), part([a, b, c], 3, **END, output_top_logprobs=rows)):
        parts.add(msgspec.json.decode(piece.removeprefix(b"data: "), type=StreamPart))
    top = response("e", parts.whole(), Recording(top=1)).top
    assert top.tolist() == [[(-0.5, a)], [(-0.25, b)], [(-0.75, c)]]
    assert cut(replace(made, top=top), 2, 1).top.tolist() == top[:2].tolist()


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([part([5], 1)], "without its last part"),
        ([part([5], 2, **END)], "do not fit together"),
        ([part([5], 1, finish_reason={"type": "stop"}), part([6], 2)], "do not fit together"),
        ([b'data: {"error": {"message": "too long"}}\n\n'], "too long"),
        ([b"data: {\n\n"], "unexpected part"),
        ([], "without its last part"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(known: Tokenizer, pieces: list[bytes], why: str) -> None:
    with pytest.raises(EngineError, match=why):
        streamed(known, pieces)


def test_masks_of_parts_add_up(known: Tokenizer) -> None:
    a, b, c = known.encode("abc")
    one = {"output_token_sampling_mask": [[a, b]], "output_token_sampling_logprobs": [-0.1]}
    two = {"output_token_sampling_mask": [[b], [c, a]], "output_token_sampling_logprobs": [-0.2, -0.3]}

    parts = Parts("e")
    for piece in (part([a], 1, **one), part([b, c], 3, **END, **two)):
        parts.add(msgspec.json.decode(piece.removeprefix(b"data: "), type=StreamPart))
    made = response("e", parts.whole(), Recording(masks=True, vocabulary=64))
    assert made.logprobs.tolist() == np.array([-0.1, -0.2, -0.3], np.float32).tolist()
    assert (made.masks.counts.tolist(), made.masks.ids.tolist()) == ([2, 1, 2], [a, b, b, c, a])
