"""One episode: a prompt to an engine, its response to the scorer, both into a trajectory."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from asyncmoe.config.generation import Interruption
from asyncmoe.rollout.engine_client import Sampling
from asyncmoe.rollout.interruption import respond
from asyncmoe.rollout.pool import Pool
from asyncmoe.rollout.scoring import Scorer
from asyncmoe.rollout.tasks import Demonstration, Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.rollout.turns import Place, assemble
from asyncmoe.trajectory import NOT_SAMPLED, Trajectory


async def run(
    prompt: Prompt,
    place: Place,
    pool: Pool,
    sampling: Sampling,
    tokenizer: Tokenizer,
    scorer: Scorer,
    interruption: Interruption = "in_place",
) -> Trajectory:
    """Generate one response to a prompt and score it.

    Raises:
        TrajectoryRejected: the engine died or failed, the response could not be scored, or its record is not what it should be.
    """
    begin = time.perf_counter()
    turns = await respond(pool, prompt.tokens, (), sampling, interruption)
    generated = time.perf_counter()
    response = tokenizer.decode([token for turn in turns for token in turn.generation.tokens])
    reward = await scorer.score(prompt.text, response, prompt.answer)
    seconds = {"generate": generated - begin, "score": time.perf_counter() - generated}
    # Routes of a long response are megabytes: beside the event loop, which other responses wait for.
    return await asyncio.to_thread(assemble, turns, place, sampling.recording, reward, seconds)


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
