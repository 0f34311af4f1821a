"""The teacher: a second SGLang server that returns its log-probability of every token the policy sampled.

A request prefills the conversation and generates nothing (POST /generate with `max_new_tokens` 0, `logprob_start_len` 0). SGLang computes
the log-probabilities of a prompt from the plain softmax, whatever the temperature (`temp_scaled_logprobs`, schedule_batch.py).
The teacher must have the policy's tokenizer.
"""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import GARBAGE, NAN, Sample, Score

_TOKEN_BYTES = 128
_REST_BYTES = 1 << 20


class _Meta(msgspec.Struct, frozen=True):
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Read(msgspec.Struct, frozen=True):
    meta_info: _Meta


def asked(sample: Sample) -> tuple[bytes, int]:
    """Return the request for a sample's log-probabilities, and the maximum bytes of its answer."""
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
        raise TrajectoryRejected(GARBAGE, f"the teacher's answer cannot be read: {error}") from error
    # SGLang reports the last id of its vocabulary as 0 (`_process_input_token_logprobs`, logprob_result_processor.py).
    shown = tuple(token or sent for (_, token, _), sent in zip(entries, sample.tokens, strict=False))
    if len(entries) != len(sample.tokens) or shown != sample.tokens:
        raise TrajectoryRejected(GARBAGE, f"the teacher's log-probabilities do not match the {len(sample.tokens)} tokens sent")
    values = np.zeros(len(entries), dtype=np.float32)
    for i, ((value, _, _), sampled) in enumerate(zip(entries, sample.sampled, strict=True)):
        if not sampled:
            continue
        if value is None or not abs(value) <= np.finfo(np.float32).max:
            raise TrajectoryRejected(NAN, f"the teacher's log-probability of token {i} is {value}, expected a finite number")
        values[i] = value
    return Score(0.0, teacher=values)
