"""The body of a request to `/generate`, and the response in its answer. Decisions only: nothing here waits or communicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from asyncmoe.errors import EngineError
from asyncmoe.rollout.engines.types import ABORTED, Generation, PromptLogprobs, Sampling, VersionSpan
from asyncmoe.trajectory import Recording


class Finish(msgspec.Struct, frozen=True):
    """Why a response ended."""

    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct, frozen=True):
    """Everything about a response but its tokens."""

    finish_reason: Finish
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    weight_versions: list[VersionSpan]
    cached_tokens: int = 0
    routed_experts: bytes | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class Generated(msgspec.Struct, frozen=True):
    """The answer of `/generate`."""

    output_ids: list[int]
    meta_info: Meta


class ScoredMeta(msgspec.Struct, frozen=True):
    """The part of `Meta` that a scored prompt has."""

    input_token_logprobs: list[tuple[float | None, int, str | None]]
    weight_versions: list[VersionSpan]


class Scored(msgspec.Struct, frozen=True):
    """The answer of `/generate` to `scoring_body`."""

    meta_info: ScoredMeta


def scoring_body(tokens: Sequence[int], salt: str, adapter: str | None) -> dict[str, Any]:
    """Return the request for the log-probabilities of a prompt. One token is sampled: its version is that of the forward pass."""
    return {
        "input_ids": list(tokens),
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": salt,
        "lora_path": adapter,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "ignore_eos": True},
    }


def scored(name: str, tokens: Sequence[int], reply: Scored) -> PromptLogprobs:
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
    return PromptLogprobs((0.0, *(value for value in values if value is not None)), meta.weight_versions[0].version)


def request_body(tokens: Sequence[int], sampling: Sampling, salt: str, routed: int, adapter: str | None) -> dict[str, Any]:
    """Return the request for one response; the arguments are those of `Engine.generate`."""
    recording = sampling.recording
    return {
        "input_ids": list(tokens),
        "return_logprob": True,
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


def response(name: str, reply: Generated, recording: Recording) -> Generation:
    """Return the response in an answer.

    Args:
        name: name of the engine in errors.

    Raises:
        EngineError: the engine itself aborted the request, or the parts of the answer contradict each other.
    """
    meta = reply.meta_info
    if meta.finish_reason.type == ABORTED and meta.finish_reason.status_code is not None:
        raise EngineError(f"{name}: the request was aborted: {meta.finish_reason.message}")
    tokens = tuple(reply.output_ids)
    logprobs = tuple(entry[0] for entry in meta.output_token_logprobs)
    if tuple(entry[1] for entry in meta.output_token_logprobs) != tokens or None in logprobs:
        raise EngineError(f"{name}: log-probabilities do not match the response's {len(tokens)} tokens")
    ends = [span.end for span in meta.weight_versions]
    if [span.start for span in meta.weight_versions] != [0, *ends[:-1]] or ends[-1:] != [len(tokens)]:
        raise EngineError(f"{name}: version spans {meta.weight_versions} do not cover {len(tokens)} tokens")
    values = tuple(value for value in logprobs if value is not None)
    if recording.masks:
        values = tuple(meta.output_token_sampling_logprobs or ())
        if len(values) != len(tokens):
            raise EngineError(f"{name}: got {len(values)} log-probabilities over sampling masks, expected {len(tokens)}")
    return Generation(
        tokens,
        values,
        tuple(meta.weight_versions),
        meta.finish_reason.type,
        meta.cached_tokens,
        meta.routed_experts,
        meta.output_token_sampling_mask,
    )
