"""A teacher beside a scorer: a second SGLang server that returns its log-probability of every token the policy sampled.

A request prefills the conversation and generates nothing (POST /generate with `max_new_tokens` 0, `logprob_start_len` 0). SGLang computes
the log-probabilities of a prompt from the plain softmax, whatever the temperature (`temp_scaled_logprobs`, schedule_batch.py).
The teacher must have the policy's tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.async_tasks import together
from asyncmoe.rollout.scoring.limits import LimitedScorer
from asyncmoe.rollout.scoring.types import GARBAGE, NAN, Sample, Score, Scorer

_TOKEN_BYTES = 128
_REST_BYTES = 1 << 20


class _Meta(msgspec.Struct, frozen=True):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Read(msgspec.Struct, frozen=True):
    meta_info: _Meta


class Taught:
    """A scorer and a teacher, called concurrently: see `Scorer`. If scorer or teacher fails, the other call is cancelled.

    Args:
        scorer: None (`scoring.scorer: none`): the reward is 0.
        teacher: supplies `Score.teacher`.
    """

    def __init__(self, scorer: Scorer | None, teacher: Scorer) -> None:
        self.scorer, self.teacher = scorer, teacher

    async def score(self, sample: Sample) -> Score:
        """See `Scorer`."""
        if self.scorer is None:
            return Score(0.0, teacher=await self.teach(sample))
        score, taught = await together([one.score(sample) for one in (self.scorer, self.teacher)])
        return replace(score, teacher=taught.teacher)

    async def teach(self, sample: Sample) -> np.ndarray | None:
        """Return only `Score.teacher`, where the environment supplies the reward. Raises as `score`."""
        return (await self.teacher.score(sample)).teacher

    async def close(self) -> None:
        """See `Scorer`."""
        await asyncio.gather(*(one.close() for one in (self.scorer, self.teacher) if one is not None))


def untaught(scorer: Scorer) -> Scorer:
    """Return `scorer` without its teacher. A teacher without a scorer is returned unchanged."""
    return scorer.scorer if isinstance(scorer, Taught) and scorer.scorer is not None else scorer


def stages(scorer: Scorer) -> Mapping[str, LimitedScorer]:
    """Return the stages of `scorer` that may fail, by name: "scorer", "teacher"."""
    parts = {"scorer": scorer.scorer, "teacher": scorer.teacher} if isinstance(scorer, Taught) else {"scorer": scorer}
    return {name: part for name, part in parts.items() if isinstance(part, LimitedScorer)}


def asked(sample: Sample) -> tuple[bytes, int]:
    """Return the request of a sample's log-probabilities, and the bytes that its answer may have."""
    body = {
        "input_ids": sample.tokens,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }
    return msgspec.json.encode(body), _TOKEN_BYTES * len(sample.tokens) + _REST_BYTES


def read(body: object, sample: Sample) -> Score:
    """Convert the server's answer to a score without a reward.

    Raises:
        TrajectoryRejected: "scorer_garbage": the answer does not fit this conversation; "scorer_nan": a log-probability is not finite.
    """
    try:
        entries = msgspec.json.decode(cast(bytes, body), type=_Read).meta_info.input_token_logprobs
    except (ValueError, RecursionError) as error:
        raise TrajectoryRejected(GARBAGE, f"the teacher's answer: {error}") from error
    # SGLang reports the last id of its vocabulary as 0 (`_process_input_token_logprobs`, logprob_result_processor.py).
    shown = tuple(token or sent for (_, token, _), sent in zip(entries, sample.tokens, strict=False))
    if len(entries) != len(sample.tokens) or shown != sample.tokens:
        raise TrajectoryRejected(GARBAGE, f"the teacher's log-probabilities do not match the {len(sample.tokens)} tokens sent")
    values = np.zeros(len(entries), dtype=np.float32)
    for i, ((value, _, _), sampled) in enumerate(zip(entries, sample.sampled, strict=True)):
        if not sampled:
            continue
        if value is None or not abs(value) <= np.finfo(np.float32).max:
            raise TrajectoryRejected(NAN, f"the teacher's log-probability of token {i} is {value}")
        values[i] = value
    return Score(0.0, teacher=values)
