"""One episode: a prompt to an engine, its response to the scorer, both into a trajectory."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.engine_client import Generation, Sampling
from asyncmoe.rollout.pool import Pool
from asyncmoe.rollout.scoring import Scorer
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.trajectory import NOT_SAMPLED, Trajectory


@dataclass(frozen=True)
class Place:
    """Which episode this is; `attempt` counts the times its group was started over."""

    group: int
    episode: int
    attempt: int

    @property
    def key(self) -> str:
        return f"g{self.group}.e{self.episode}.a0.t{self.attempt}"


async def run(prompt: Prompt, place: Place, pool: Pool, sampling: Sampling, tokenizer: Tokenizer, scorer: Scorer) -> Trajectory:
    """Generate one response to a prompt and score it.

    Raises:
        TrajectoryRejected: the engine died or failed, or the response could not be scored.
    """
    begin = time.perf_counter()
    answer = await pool.generate(prompt.tokens, sampling)
    generated = time.perf_counter()
    response = tokenizer.decode(answer.generation.tokens)
    reward = await scorer.score(prompt.text, response, prompt.answer)
    seconds = {"generate": generated - begin, "score": time.perf_counter() - generated}
    return assemble(prompt.tokens, place, answer.generation, answer.salt, reward, seconds)


def assemble(
    prompt: tuple[int, ...], place: Place, generation: Generation, salt: int, reward: float, seconds: dict[str, float]
) -> Trajectory:
    """The record of an episode.

    `prefix_version` is the salt when the first token was sampled by that version too. Everything in the prefix cache under that
    salt was then computed by it: requests carry the salt only while the version is served, so whatever a later version computed
    under it was computed after the first token was sampled.

    Raises:
        TrajectoryRejected: "bad_version": a span's version is not one of ours.
    """
    given, sampled = len(prompt), len(generation.tokens)
    versions = np.full(given + sampled, NOT_SAMPLED, dtype=np.int32)
    for span in generation.spans:
        versions[given + span.start : given + span.end] = _version(place, span.version)
    return Trajectory(
        key=place.key,
        group=place.group,
        episode=place.episode,
        attempt=place.attempt,
        tokens=np.array(prompt + generation.tokens, dtype=np.int32),
        loss_mask=np.arange(given + sampled) >= given,
        logprobs=np.array((0.0,) * given + generation.logprobs, dtype=np.float32),
        versions=versions,
        reward=reward,
        finish=generation.finish,
        prefix_version=salt if versions[given] == salt else NOT_SAMPLED,
        seconds=seconds,
    )


def demonstration(index: int, made: Demonstration) -> Trajectory:
    """A solved question as a record that was sampled by no version."""
    size = len(made.tokens)
    return Trajectory(
        key=f"d{index}",
        group=index,
        episode=0,
        tokens=np.array(made.tokens, dtype=np.int32),
        loss_mask=np.array(made.loss_mask, dtype=bool),
        logprobs=np.zeros(size, dtype=np.float32),
        versions=np.full(size, NOT_SAMPLED, dtype=np.int32),
        reward=0.0,
        finish="stop",
    )


def _version(place: Place, version: str) -> int:
    if not version.isdecimal():
        raise TrajectoryRejected("bad_version", f"{place.key}: the engine serves {version!r}, which is no version of this run")
    return int(version)
