"""Invalid data do not pass the queue: they are counted by reason and named in the log, and other groups continue."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from kept_trajectory import distinct
from test_producer import alone

from asyncmoe.engines.types import Generation, VersionSpan
from asyncmoe.errors import ProtocolError
from asyncmoe.log.log import Place
from asyncmoe.queue.admission import Admission
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import NOT_SAMPLED, Recording, Routing, Trajectory, decode, encode_routes, frames_in
from asyncmoe.trajectory.sent_routes import to_bytes
from benchmarks.unlogged import Unlogged
from tests.unit.asynchronous import asynchronous
from tests.unit.generations import generation_of

GROUP, BATCH, VOCABULARY = 2, 4, 50
ROUTING = Routing(all_layers=5, layers=(1, 2, 3, 4), top_k=2, experts=8)
RECORDING = Recording(ROUTING, masks=True, vocabulary=VOCABULARY)
PROMPT = (3, 4, 5)
RESPONSE = (7, 9, 11, 2)
BAD = "g1.e1.a0.t0"


SAME: Any = SimpleNamespace(prompt=lambda group: Prompt("", PROMPT, ""))
"""A task that always asks the same."""


def routes(rows: int = len(PROMPT) + len(RESPONSE) - 1) -> np.ndarray:
    return distinct(np.random.default_rng(rows), rows, ROUTING.all_layers, ROUTING.top_k, ROUTING.experts)


def answer(**changes: Any) -> Generation:
    """An engine's record of a response; valid unless changed."""
    right: dict[str, Any] = {
        "tokens": RESPONSE,
        "logprobs": (-0.5, -0.25, -1.0, -0.125),
        "spans": (VersionSpan("0", 0, len(RESPONSE)),),
        "finish": "stop",
        "routes": to_bytes(encode_routes(routes(), ROUTING, "a response")),
        "masks": [[9, token, 30] if token != 9 else [9, 30] for token in RESPONSE],
    }
    return generation_of(**(right | changes))


def record(place: EpisodeId, generation: Generation, recording: Recording = RECORDING) -> Trajectory:
    return assemble([Turn(PROMPT, generation, 0)], place, recording, 1.0, {})


ANSWERS: dict[str, dict[str, Any]] = {
    "no_routes": {"routes": None},
    "routes_malformed": {"routes": b"routes_repeated: a response: token 4, layer 2, choice 0"},
    "routes_wrong_layers": {"routes": to_bytes(encode_routes(routes(), dataclasses.replace(ROUTING, layers=(0, 1, 2, 3)), "a response"))},
    "no_mask": {"masks": None},
    "mask_without_token": {"masks": [[7], [9], [], [2]]},
    "bad_mask": {"masks": [[7], [9], [11, VOCABULARY], [2]]},
    "bad_logprob": {"logprobs": (-0.5, float("nan"), -1.0, -0.125)},
    "length_mismatch": {"logprobs": (-0.5, -0.25, -1.0)},
    "version_from_future": {"spans": (VersionSpan("0", 0, 2), VersionSpan("2", 2, 4))},
    "bad_version": {"spans": (VersionSpan("0", 0, 3),)},
}


SHORT = encode_routes(routes(5), ROUTING, "routes of fewer tokens")
SPOILT = [*((reason, changes, {}) for reason, changes in ANSWERS.items()), ("no_mask", {}, {"masks": None})]
SPOILT += [("length_mismatch", {}, {"routes": SHORT}), ("mask_without_token", {"masks": [[7], [9], [12], [2]]}, {})]


@pytest.mark.parametrize(("reason", "of_answer", "of_record"), SPOILT)
@asynchronous
async def test_groups_with_a_bad_answer_or_record_are_left_out_and_named(
    reason: str, of_answer: dict[str, Any], of_record: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Group 1 is spoilt by its second member; two steps and more are trained on the others."""
    held = BoundedQueue(Admission(BATCH, 2), Unlogged(), capacity=2 * BATCH, group_size=GROUP)

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        if place.key() == BAD:
            return dataclasses.replace(record(place, answer(**of_answer)), **of_record)
        return record(place, answer())

    trained: list[int] = []
    worker = Worker(alone(play), GROUP, RECORDING)
    producing = asyncio.create_task(Producer(held, SAME, worker, GROUP).run())  # type: ignore[arg-type]
    for step in range(3):
        leased = await held.lease(step, "rl", BATCH, step, 3.0)
        trained += sorted({item.group for item in leased.items})
        frames = await worker.fetch({item.key: Place(1, 0) for item in leased.items})
        assert len(frames) == frames_in(BATCH)
        held.commit(step)
        held.set_version(step + 1)
    assert trained == [0, 2, 3, 4, 5, 6]
    assert held.accounts.rejected == {reason: GROUP}
    assert held.ledger.trained == 3 * BATCH
    assert not producing.done()
    # Threads that other tests have left behind may have their say too.
    ours = [entry for entry in caplog.records if entry.name.startswith("asyncmoe.rollout")]
    (line,) = [entry.getMessage() for entry in ours if entry.levelno >= logging.WARNING]
    assert f"rejected for {reason}: " in line
    assert f"{BAD}: " in line


def assembled(salt: int, *spans: tuple[str, int, int]) -> Trajectory:
    size = spans[-1][2]
    made = generation_of(tuple(range(10, 10 + size)), (-1.0,) * size, tuple(VersionSpan(*span) for span in spans), "length", 0)
    return assemble([Turn((3, 4, 5), made, salt)], EpisodeId(7, 2, 1), Recording(), 0.5, {"generate": 1.0})


def test_every_token_has_the_version_that_sampled_it() -> None:
    record = assembled(4, ("4", 0, 2), ("5", 2, 3))
    assert record.key == "g7.e2.a0.t1"
    assert record.tokens.tolist() == [3, 4, 5, 10, 11, 12]
    assert record.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert record.versions.tolist() == [NOT_SAMPLED] * 3 + [4, 4, 5]
    np.testing.assert_array_equal(record.logprobs, np.array([0, 0, 0, -1, -1, -1], np.float32))


def test_only_a_prefix_of_the_first_tokens_version_is_trusted() -> None:
    across = assembled(4, ("4", 0, 2), ("5", 2, 3))
    assert (across.prefix_version, across.is_pure) == (4, False)
    assert assembled(4, ("4", 0, 3)).is_pure
    held_back = assembled(4, ("5", 0, 3))
    assert (held_back.prefix_version, held_back.is_pure) == (NOT_SAMPLED, False)


# ---------------------------------------------------------------- what a trainer's stage fetches


@asynchronous
async def test_a_stage_is_sent_the_routes_of_its_own_layers_and_masks_if_it_wants_them() -> None:
    """What is in such a part: tests/unit/test_trajectory.py."""
    held = [record(EpisodeId(1, episode, 0), answer()) for episode in range(GROUP)]
    worker = Worker(alone(Mock()), GROUP, RECORDING)  # which plays nothing
    await worker.hold(held, 1)

    async def fetch(*how: Any) -> Trajectory:
        return decode(list(await worker.fetch({BAD: Place(1, 0)}, *how)))

    first, last = await fetch((1, 2), False), await fetch((4,), True)
    assert (first.routes.layers, first.masks) == ((1, 2), None)
    assert (last.routes.layers, last.masks.data) == ((4,), held[1].masks.data)
    with pytest.raises(ProtocolError, match=rf"{BAD}.*got layers \(1, 5\) to send, expected some of \(1, 2, 3, 4\)"):
        await fetch((1, 5))
