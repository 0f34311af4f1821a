"""Invalid data do not pass the queue: they are counted by reason and named in the log, and other groups continue."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

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
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.workers.worker import Worker
from asyncmoe.trajectory import NOT_SAMPLED, Recording, Routing, Trajectory, decode, decode_routes, encode_routes, frames_in
from benchmarks.unlogged import Unlogged

GROUP, BATCH, VOCABULARY = 2, 4, 50
ROUTING = Routing(all_layers=5, layers=(1, 2, 3, 4), top_k=2, experts=8)
RECORDING = Recording(ROUTING, masks=True, vocabulary=VOCABULARY)
PROMPT = (3, 4, 5)
RESPONSE = (7, 9, 11, 2)
BAD = "g1.e1.a0.t0"
PLACE = (Place(1, 0),)


class Same:
    """A task that always asks the same."""

    def prompt(self, group: int) -> Prompt:
        return Prompt("", PROMPT, "")

    def demonstration(self, index: int) -> Demonstration:
        raise NotImplementedError


def routes(rows: int = len(PROMPT) + len(RESPONSE) - 1) -> np.ndarray:
    return distinct(np.random.default_rng(rows), rows, ROUTING.all_layers, ROUTING.top_k, ROUTING.experts)


def plain(rows: np.ndarray) -> bytes:
    return bytes(rows.astype("<i4").tobytes())


def with_expert(expert: int) -> bytes:
    rows = routes()
    rows[4, 2, 0] = expert
    return plain(rows)


def answer(**changes: Any) -> Generation:
    """An engine's record of a response; valid unless changed."""
    right: dict[str, Any] = {
        "tokens": RESPONSE,
        "logprobs": (-0.5, -0.25, -1.0, -0.125),
        "spans": (VersionSpan("0", 0, len(RESPONSE)),),
        "finish": "stop",
        "routes": plain(routes()),
        "masks": [[9, token, 30] if token != 9 else [9, 30] for token in RESPONSE],
    }
    return Generation.of(**(right | changes))


def record(place: EpisodeId, generation: Generation, recording: Recording = RECORDING) -> Trajectory:
    return assemble([Turn(PROMPT, generation, 0)], place, recording, 1.0, {})


def queue() -> BoundedQueue:
    return BoundedQueue(Admission(BATCH, 2), Unlogged(), capacity=2 * BATCH, group_size=GROUP)


ANSWERS: dict[str, dict[str, Any]] = {
    "no_routes": {"routes": None},
    "routes_out_of_range": {"routes": with_expert(8)},
    "routes_repeated": {"routes": with_expert(int(routes()[4, 2, 1]))},
    "routes_wrong_layers": {"routes": plain(routes()[:, 1:])},
    "no_mask": {"masks": None},
    "mask_without_token": {"masks": [[7], [9], [], [2]]},
    "bad_mask": {"masks": [[7], [9], [11, VOCABULARY], [2]]},
    "bad_logprob": {"logprobs": (-0.5, float("nan"), -1.0, -0.125)},
    "length_mismatch": {"logprobs": (-0.5, -0.25, -1.0)},
    "version_from_future": {"spans": (VersionSpan("0", 0, 2), VersionSpan("2", 2, 4))},
    "bad_version": {"spans": (VersionSpan("0", 0, 3),)},
}


async def refusing(spoilt: Callable[[EpisodeId], Trajectory], reason: str) -> None:
    """Have group 1 spoilt by its second member, and train two steps and more on the others."""
    held = queue()

    async def play(prompt: Prompt, place: EpisodeId) -> Trajectory:
        return spoilt(place) if place.key() == BAD else record(place, answer())

    trained: list[int] = []
    worker = Worker(alone(play), GROUP, RECORDING)
    producing = asyncio.create_task(Producer(held, Same(), worker, GROUP).run())  # type: ignore[arg-type]
    for step in range(3):
        leased = await held.lease(step, "rl", BATCH, step, 3.0)
        trained += sorted({item.group for item in leased.items})
        frames = await worker.fetch([item.key for item in leased.items], [Place(1, 0)] * BATCH)
        assert len(frames) == frames_in(BATCH)
        held.commit(step)
        held.set_version(step + 1)
    assert trained == [0, 2, 3, 4, 5, 6]
    assert held.accounts.rejected == {reason: GROUP}
    assert held.ledger.trained == 3 * BATCH
    assert not producing.done()
    producing.cancel()


def check_log(caplog: pytest.LogCaptureFixture, reason: str) -> None:
    # Threads that other tests have left behind may have their say too.
    ours = [entry for entry in caplog.records if entry.name.startswith("asyncmoe.rollout")]
    lines = [entry.getMessage() for entry in ours if entry.levelno >= logging.WARNING]
    assert len(lines) == 1
    assert f"rejected for {reason}: " in lines[0]
    assert f"{BAD}: " in lines[0]


@pytest.mark.parametrize("reason", ANSWERS)
def test_a_bad_answer_of_an_engine(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(asyncio.wait_for(refusing(lambda place: record(place, answer(**ANSWERS[reason])), reason), 30))
    check_log(caplog, reason)


SHORT = encode_routes(routes(5), ROUTING, "routes of fewer tokens")


@pytest.mark.parametrize(("reason", "changes"), [("no_mask", {"masks": None}), ("length_mismatch", {"routes": SHORT})])
def test_a_bad_record(reason: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(asyncio.wait_for(refusing(lambda place: dataclasses.replace(record(place, answer()), **changes), reason), 30))
    check_log(caplog, reason)


def assembled(salt: int, *spans: tuple[str, int, int]) -> Trajectory:
    size = spans[-1][2]
    made = Generation.of(tuple(range(10, 10 + size)), (-1.0,) * size, tuple(VersionSpan(*span) for span in spans), "length", 0)
    return assemble([Turn((3, 4, 5), made, salt)], EpisodeId(7, 2, 1), Recording(), 0.5, {"generate": 1.0})


def test_every_token_has_the_version_that_sampled_it() -> None:
    record = assembled(4, ("4", 0, 2), ("5", 2, 3))
    assert record.key == "g7.e2.a0.t1"
    assert record.tokens.tolist() == [3, 4, 5, 10, 11, 12]
    assert record.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert record.versions.tolist() == [NOT_SAMPLED] * 3 + [4, 4, 5]
    np.testing.assert_array_equal(record.logprobs, np.array([0, 0, 0, -1, -1, -1], np.float32))
    assert record.prefix_version == 4
    assert not record.is_pure


def test_only_a_prefix_of_the_first_tokens_version_is_trusted() -> None:
    assert assembled(4, ("4", 0, 3)).is_pure
    held_back = assembled(4, ("5", 0, 3))
    assert held_back.prefix_version == NOT_SAMPLED
    assert not held_back.is_pure


# ---------------------------------------------------------------- what a trainer's stage fetches


def long_record(group: int, episode: int) -> Trajectory:
    response = tuple(np.random.default_rng(episode).integers(0, VOCABULARY, 500).tolist())
    generation = Generation.of(
        response,
        (-1.0,) * len(response),
        (VersionSpan("0", 0, len(response)),),
        "length",
        0,
        plain(routes(len(PROMPT) + len(response) - 1)),
        [[token] for token in response],
    )
    return record(EpisodeId(group, episode, 0), generation)


async def unasked(prompt: Prompt, place: EpisodeId) -> Trajectory:
    raise NotImplementedError


def sizes(frames: Sequence[Any]) -> list[int]:
    return [memoryview(frame).nbytes for frame in frames]


def test_a_stage_is_sent_the_routes_of_its_own_layers_and_masks_if_it_wants_them() -> None:
    key, routes_at, masks_at = "g1.e1.a0.t0", frames_in(1) - 2, frames_in(1) - 1
    whole = long_record(1, 1)
    masks = whole.masks
    unpacked = decode_routes(whole.routes, key)

    async def body() -> None:
        worker = Worker(alone(unasked), GROUP, RECORDING)
        await worker.hold([long_record(1, episode) for episode in range(GROUP)], 1)

        async def fetch(*how: Any) -> list[Any]:
            return list(await worker.fetch((key,), PLACE, *how))

        full = sizes(await fetch())
        for layers in ((1, 2), (3, 4), (1, 4)):
            sent = await fetch(layers, False)
            got = decode(sent)
            assert got.routes.layers == layers
            assert got.masks is None
            assert sizes(sent)[routes_at] * 2 == full[routes_at]
            assert sizes(sent)[masks_at] == 0
            np.testing.assert_array_equal(decode_routes(got.routes, key), unpacked[[layer - 1 for layer in layers]])
            np.testing.assert_array_equal(got.tokens, whole.tokens)
        last = decode(await fetch((4,), True))
        assert last.masks.data == masks.data
        assert full[masks_at] > 0
        for absent in ((0,), (1, 5), (2, 1), (3, 3)):
            with pytest.raises(ProtocolError, match=rf"{key}.*got layers \({absent[0]},.*expected some of \(1, 2, 3, 4\)"):
                await fetch(absent)

    asyncio.run(asyncio.wait_for(body(), 30))
