"""Request bodies for `/generate`, and the log-probabilities of a prompt in an answer. Pure: nothing here waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from asyncmoe.engines.types import Sampling, Tokens, VersionSpan
from asyncmoe.errors import EngineError


class ScoredMeta(msgspec.Struct, frozen=True):
    """The part of the answer's `meta_info` that is used."""

    input_token_logprobs: list[tuple[float | None, int, str | None]]
    weight_versions: list[VersionSpan]


class Scored(msgspec.Struct, frozen=True):
    """The answer of `/generate` to `scoring_body`."""

    meta_info: ScoredMeta


def scoring_body(tokens: Sequence[int], salt: str) -> dict[str, Any]:
    """Return the request for a prompt's log-probabilities, without an adapter. One token is sampled, to learn the versions."""
    return {
        "input_ids": list(tokens),
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": salt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "ignore_eos": True},
    }


def scored(name: str, tokens: Sequence[int], reply: Scored) -> tuple[float, ...]:
    """Return the log-probabilities in an answer.

    Raises:
        EngineError: the answer does not fit the prompt, or a value is not finite.
    """
    meta = reply.meta_info
    # SGLang reports the last id of its vocabulary as 0 (`_process_input_token_logprobs`, logprob_result_processor.py).
    shown = [token or sent for (_, token, _), sent in zip(meta.input_token_logprobs, tokens, strict=False)]
    if len(meta.input_token_logprobs) != len(tokens) or shown != list(tokens) or len(meta.weight_versions) != 1:
        raise EngineError(f"{name}: log-probabilities do not match the {len(tokens)} tokens of the prompt")
    values = [value for value, _, _ in meta.input_token_logprobs[1:]]
    if not all(value is not None and math.isfinite(value) for value in values):
        raise EngineError(f"{name}: a log-probability of the prompt is not finite")
    return (0.0, *(value for value in values if value is not None))


def request_body(tokens: Tokens, sampling: Sampling, salt: str, routed: int, adapter: str | None) -> dict[str, Any]:
    """Return the request for one response; the arguments are those of `Engine.generate`."""
    recording = sampling.recording
    return {
        "input_ids": tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens),
        "return_logprob": True,
        "top_logprobs_num": recording.top,
        "return_sampling_mask": recording.masks,
        "return_routed_experts": recording.routing is not None,
        "routed_experts_start_len": routed if recording.routing is not None else 0,
        "cache_salt": salt,
        "lora_path": adapter,
        "sampling_params": {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": not sampling.stop,
            # Always sent, because a model's generation_config.json can change the server's defaults.
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": sampling.min_p,
            "skip_special_tokens": False,
        },
    }
