"""The answer of `/generate`, decoded to arrays.

An engine that this program started packs its answers (`asyncmoe.platform.sglang.packed_answers`); they are read without a copy. An answer
that it cannot pack arrives as SGLang's own JSON (`streaming.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from asyncmoe.engines.types import ABORTED, Generation, IdLists, VersionSpan
from asyncmoe.errors import EngineError
from asyncmoe.platform.sglang.packed_answers import BEGIN, MAGIC, PARTS, AnswerHead
from asyncmoe.trajectory import TOP, Buffer, Recording

Entry = tuple[float | None, int, str | None]
"""A log-probability in nats, its token, and the token's text."""


class Finish(msgspec.Struct, frozen=True):
    """Why a response ended."""

    type: Literal["stop", "length", "abort"]
    message: str | None = None
    status_code: int | None = None


@dataclass(frozen=True, eq=False)
class GenerateAnswer:
    """The parts of an answer that are used.

    Attributes:
        tokens: int32[R].
        logprobs: float32[R], their log-probabilities, NaN for null.
        masks: the ids that each token was sampled from, if requested.
        mask_logprobs: float32[R], log-probabilities of the tokens, normalised over these ids.
        top: TOP[R K], all tokens' most probable ids in turn, over the whole vocabulary, if requested.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: Sequence[VersionSpan]
    finish: Finish
    cached_tokens: int
    routes: Buffer | None
    masks: IdLists | None
    mask_logprobs: np.ndarray | None
    top: np.ndarray | None


def packed_answer(body: Buffer) -> GenerateAnswer:
    """Read a packed answer. Its arrays and routes are views of `body`, which is not copied.

    Raises:
        ValueError: it is not a packed answer, or its parts are inconsistent.
    """
    view = memoryview(body).cast("B").toreadonly()
    if len(view) < BEGIN.size:
        raise ValueError(f"got {len(view)} bytes, expected at least {BEGIN.size}")
    magic, size = BEGIN.unpack_from(view)
    if magic != MAGIC:
        raise ValueError(f"got {magic!r} at the beginning, expected {MAGIC!r}")
    at = BEGIN.size + size
    head = msgspec.json.decode(view[BEGIN.size : at], type=AnswerHead)
    tokens, logprobs, counts, ids, mask_logprobs, top, routes = _parts(view, at, head.counts)
    if tokens is None or logprobs is None or len(tokens) != len(logprobs):
        raise ValueError("output_token_logprobs: got none, or not as many as output_ids, expected one for each id")
    masks = None
    if counts is not None or ids is not None:
        if counts is None or ids is None or (counts < 0).any() or counts.sum(dtype=np.int64) != len(ids):
            raise ValueError("output_token_sampling_mask: got lists whose lengths do not add up to the number of ids")
        masks = IdLists(counts, ids)
    if routes is not None and (masks is not None or top is not None):
        routes = routes.copy()  # a queued trajectory keeps its routes: a view would keep the rest, which may be larger, in memory too
    return GenerateAnswer(
        tokens,
        logprobs,
        msgspec.json.decode(head.weight_versions, type=list[VersionSpan]),
        msgspec.json.decode(head.finish_reason, type=Finish),
        head.cached_tokens,
        None if routes is None else routes.data,
        masks,
        mask_logprobs,
        top,
    )


def _parts(view: memoryview, at: int, counts: Sequence[int | None]) -> list[np.ndarray | None]:
    """Return the parts that lie one after another from byte `at` to the end."""
    if len(counts) != len(PARTS):
        raise ValueError(f"got {len(counts)} parts, expected {len(PARTS)}")
    found: list[np.ndarray | None] = []
    for (name, kind), count in zip(PARTS, counts, strict=True):
        if count is None:
            found.append(None)
            continue
        end = at + count * np.dtype(kind).itemsize
        if not at <= end <= len(view):
            raise ValueError(f"{name}: got {count} elements, expected no more than the remaining {len(view) - at} bytes hold")
        found.append(np.frombuffer(view[at:end], kind))
        at = end
    if at != len(view):
        raise ValueError(f"got {len(view) - at} bytes after the last part, expected none")
    return found


def response(name: str, given: GenerateAnswer, recording: Recording) -> Generation:
    """Return the response in an answer.

    Args:
        name: name of the engine in errors.

    Raises:
        EngineError: the engine itself aborted the request, or the parts of the answer contradict each other.
    """
    if given.finish.type == ABORTED and given.finish.status_code is not None:
        raise EngineError(f"{name}: the request was aborted: {given.finish.message}")
    values, size = given.logprobs, len(given.tokens)
    if np.isnan(values).any():
        raise EngineError(f"{name}: got a log-probability that is not a number, expected a number for each of {size} tokens")
    ends = [span.end for span in given.spans]
    if [span.start for span in given.spans] != [0, *ends[:-1]] or ends[-1:] != [size]:
        raise EngineError(f"{name}: version spans {list(given.spans)} do not cover {size} tokens")
    if recording.masks:
        values = np.zeros(0, np.float32) if given.mask_logprobs is None else given.mask_logprobs
        if len(values) != size:
            raise EngineError(f"{name}: got {len(values)} log-probabilities over sampling masks, expected {size}")
    top = None
    if recording.top:
        if given.top is None or len(given.top) != size * recording.top:
            got = "no" if given.top is None else len(given.top)
            raise EngineError(f"{name}: got {got} most probable ids, expected {recording.top} for each of {size} tokens")
        top = given.top.view(TOP).reshape(size, recording.top)
        if recording.masks and given.masks is not None and len(given.masks) == size:
            top = _over_masks(top, values - given.logprobs, given.masks)
    rest = given.finish.type, given.cached_tokens, given.routes, given.masks, top
    return Generation(given.tokens, values, tuple(given.spans), *rest)


def _over_masks(top: np.ndarray, shift: np.ndarray, masks: IdLists) -> np.ndarray:
    """Return TOP[R, K] over sampling masks, from those over the whole vocabulary: a mask keeps the proportions of its ids.

    Args:
        shift: float32[R], log-probability of each sampled token over its mask minus that over the whole vocabulary.
    """
    row = np.arange(len(top)) << 32
    inside = np.isin(row[:, None] + top["id"], np.repeat(row, masks.counts) + masks.ids)
    made = top.copy()
    made["logprob"] = np.where(inside, top["logprob"] + shift[:, None], -np.inf)
    return made


def floats(values: Sequence[float | None]) -> np.ndarray:
    """Return float32[n], NaN for None; numbers that are too large become infinite, and trajectory validation refuses them."""
    with np.errstate(over="ignore"):
        return np.array(values, np.float64).astype(np.float32)
