"""Judges and teachers behind HTTP, with a real server on loopback: valid responses and every kind of failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring import Sample, Score, loading

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SAMPLE = Sample("1+1=", "2", "2", (10, 11, 12, 10, 13), (False, True, True, False, True), "solver", {"level": 3})


def served(handler: Handler, values: dict[str, Any]) -> Score | str:
    """The outcome of a call to a server that replaces URL in `values`."""

    async def run() -> Score | str:
        app = web.Application()
        app.router.add_post("/{tail:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        text = json.dumps(values).replace("URL", f"http://127.0.0.1:{runner.addresses[0][1]}")
        section = ScoringSection.model_validate({"retries": 0, **json.loads(text)})
        made = loading.load_teacher(section) or loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "")
        try:
            return await made.score(SAMPLE)
        except TrajectoryRejected as rejected:
            return str(rejected)
        finally:
            await made.close()
            await runner.cleanup()

    return asyncio.run(run())


def answering(body: bytes, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    return handler


JUDGE = {"scorer": "URL/judge"}


def test_it_is_posted_the_sample_and_answers_with_its_score() -> None:
    seen: list[object] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.json_response({"reward": 0.5, "steps": [1, -0.25]})

    score = served(handler, JUDGE)
    assert seen == [("/judge", {"prompt": "1+1=", "response": "2", "answer": "2", "agent": "solver", "columns": {"level": 3}})]
    assert (score.reward, score.teacher) == (0.5, None)
    np.testing.assert_array_equal(score.rewards, np.array([np.nan, np.nan, 1, np.nan, -0.25], np.float32))
    plain = served(answering(b'{"reward": 2, "metrics": {"format": 1}}'), JUDGE)
    assert (plain.reward, plain.rewards, plain.metrics) == (2.0, None, {"format": 1.0})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b'{"reward": "0.5"}',
        b'{"reward": 1e999}',
        b'{"reward": 1, "steps": [1, [2]]}',
        b'{"reward": 1, "metrics": {"format": null}}',
        b"[" * 100_000,
        b'{"reward": "\xff"}',
        b'{"reward": 1, "steps": [' + b"0.5, " * 400_000 + b"1]}",
    ],
    ids=lambda body: body[:30].decode(errors="replace"),
)
def test_whatever_else_it_answers_is_no_score_and_is_not_asked_for_again(body: bytes) -> None:
    calls = []

    async def handler(request: web.Request) -> web.Response:
        calls.append(request)
        return web.Response(body=body)

    found = served(handler, {**JUDGE, "retries": 3})
    assert str(found).startswith(("scorer_garbage", "scorer_nan"))
    assert len(str(found)) < 1000
    assert len(calls) == 1


@pytest.mark.parametrize(("status", "reason"), [(500, "unavailable"), (503, "unavailable"), (400, "garbage"), (204, "garbage")])
def test_a_status_has_a_reason(status: int, reason: str) -> None:
    found = served(answering(b"" if status == 204 else b"the model is loading", status), JUDGE)
    assert str(found).startswith(f"scorer_{reason}: http://127.0.0.1:")
    assert f"status {status}" in str(found)


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_says_when_to_come_back_is_not_asked_before(status: int) -> None:
    asked: list[float] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(asyncio.get_running_loop().time())
        headers = {"Retry-After": "1"} if len(asked) == 1 else {}
        return web.json_response({"reward": 1.0}, status=status if len(asked) == 1 else 200, headers=headers)

    score = served(handler, {**JUDGE, "retries": 1})
    assert isinstance(score, Score)
    assert asked[1] - asked[0] >= 1


def test_a_server_that_hangs_before_or_within_its_answer_is_not_waited_for() -> None:
    async def hangs(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    async def drips(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        while True:
            await reply.write(b" ")
            await asyncio.sleep(0.05)

    for handler in (hangs, drips):
        found = served(handler, {**JUDGE, "timeout_s": 0.5})
        assert str(found).startswith("scorer_timeout")


def test_a_server_that_drops_the_connection_or_is_not_there_is_unavailable() -> None:
    async def drops(request: web.Request) -> web.StreamResponse:
        request.transport.abort()
        return web.Response()

    found = served(drops, JUDGE)
    assert str(found).startswith("scorer_unavailable")
    # Port 9 of loopback: discard, which nobody serves any more.
    found = served(drops, {"scorer": "http://127.0.0.1:9/judge"})
    assert str(found).startswith("scorer_unavailable")


ENTRIES = [[None, 10, None], [-0.5, 11, None], [-1.5, 12, None], [-9.0, 10, None], [-0.25, 13, None]]
TEACHER = {"scorer": "exact", "teacher": {"url": "URL"}}


def taught(entries: object) -> bytes:
    return json.dumps({"text": "", "meta_info": {"input_token_logprobs": entries}}).encode()


def test_a_teacher_reads_the_conversation_and_says_nothing() -> None:
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.Response(body=taught(ENTRIES))

    score = served(handler, TEACHER)
    assert seen[0][0] == "/generate"
    assert seen[0][1]["input_ids"] == [10, 11, 12, 10, 13]
    assert (seen[0][1]["logprob_start_len"], seen[0][1]["return_logprob"]) == (0, True)
    assert score.teacher.dtype == np.float32
    assert score.teacher.tolist() == [0, -0.5, -1.5, 0, -0.25]


def test_the_last_token_of_a_vocabulary_may_be_shown_as_0() -> None:
    score = served(answering(taught([*ENTRIES[:-1], [-0.25, 0, None]])), TEACHER)
    assert score.teacher.tolist() == [0, -0.5, -1.5, 0, -0.25]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (taught(ENTRIES[:-1]), "garbage"),
        (taught([*ENTRIES, [-0.25, 14, None]]), "garbage"),
        (taught([*ENTRIES[:-1], [-0.25, 14, None]]), "garbage"),
        (taught(None), "garbage"),
        (b"{}", "garbage"),
        (taught([*ENTRIES[:-1], [None, 13, None]]), "nan"),
        (b"[" * 100_000, "garbage"),
        (b'{"meta_info": {"input_token_logprobs": [[0, 10, "\xff"]]}}', "garbage"),
    ],
)
def test_a_teacher_that_read_something_else_has_taught_nothing(body: bytes, reason: str) -> None:
    found = served(answering(body), TEACHER)
    assert str(found).startswith(f"scorer_{reason}: the teacher's")
