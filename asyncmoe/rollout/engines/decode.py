"""Decodes the routes and sampling masks of a `Generation` into the recorded arrays. Their form is that of SGLang 0.5.23:

Routes: `meta_info.routed_experts`, base64 of int32[seqlen - 1 - start, num_hidden_layers, top_k] in C order
(`sglang/srt/state_capturer`): seqlen counts prompt and response, the last token has not passed through the model, dense layers are
included, and `start` is the request's `routed_experts_start_len`, at most the length of its prompt and capped at seqlen - 1.

Masks: `meta_info.output_token_sampling_mask`, a list of ids for every token of the response, in no particular order
(`sglang/srt/sampling/sampling_mask.py`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.engines.types import Generation, VersionSpan
from asyncmoe.trajectory import Masks, Routing, decode_base64, token_outside


def cut(generation: Generation, keep: int, before: int) -> Generation:
    """Return a response that ends with its token number `keep`, as if no token had been sampled after that one.

    A token depends only on the tokens before it, so the kept tokens have the distribution and the log-probabilities of a response that
    ends by this rule.

    Args:
        keep: at least 1, at most the response's tokens.
        before: number of prompt tokens whose routes the answer contains.
    """
    size = len(generation.tokens)
    if keep == size:
        return replace(generation, finish="stop")
    spans = tuple(VersionSpan(span.version, span.start, min(span.end, keep)) for span in generation.spans if span.start < keep)
    masks = None if generation.masks is None else generation.masks[:keep]
    routes = None if generation.routes is None else _first_rows(generation.routes, before + keep - 1, before + size - 1)
    return replace(
        generation,
        tokens=generation.tokens[:keep],
        logprobs=generation.logprobs[:keep],
        spans=spans,
        finish="stop",
        masks=masks,
        routes=routes,
    )


def _first_rows(text: str, keep: int, rows: int) -> str:
    """Return the first of `rows` equal rows in base64; text that does not hold them is returned unchanged, and rejected later."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return text
    return text if len(raw) % rows else base64.b64encode(raw[: len(raw) // rows * keep]).decode()


def routed_experts(text: str | None, routing: Routing, *, tokens: int, routed: int, key: str) -> np.ndarray:
    """Decode the routes in an answer.

    Args:
        text: `meta_info.routed_experts`.
        tokens: number of tokens of prompt and response.
        routed: number of leading rows that the request excluded (`routed_experts_start_len`), because earlier turns have them.
        key: the trajectory's name, for errors.

    Returns:
        int32[tokens - 1 - routed, all_layers, top_k]; allocates no more than the text's length.

    Raises:
        TrajectoryRejected: "no_routes" if there are none, "routes_malformed" for invalid base64, "routes_wrong_layers" for the right
            number of rows with a wrong number of layers or experts per token, "length_mismatch" for a wrong number of rows.
    """
    if text is None:
        raise TrajectoryRejected("no_routes", f"{key}: the engine sent no routes; it needs --enable-return-routed-experts")
    row = routing.all_layers * routing.top_k * 4
    rows = tokens - 1 - routed
    try:
        raw = decode_base64(text)
    except ValueError as error:
        raise TrajectoryRejected("routes_malformed", f"{key}: invalid base64 in routes: {error}") from error
    if len(raw) == rows * row:
        return raw.view("<i4").reshape(rows, routing.all_layers, routing.top_k)
    if rows and len(raw) % row and len(raw) % (4 * rows) == 0:
        detail = f"{len(raw) // 4 // rows} experts a token, expected {routing.all_layers} layers of {routing.top_k}"
        raise TrajectoryRejected("routes_wrong_layers", f"{key}: got {detail}")
    raise TrajectoryRejected("length_mismatch", f"{key}: got {len(raw)} bytes of routes, expected {rows} rows of {row}")


def sampling_masks(
    lists: Sequence[Sequence[int]] | None, response: np.ndarray, vocabulary: int, *, before: int, after: int, key: str
) -> Masks:
    """Return the masks of a response within a trajectory; all other rows stand for the whole vocabulary.

    Args:
        lists: `meta_info.output_token_sampling_mask`.
        response: int32[R], the sampled tokens.
        vocabulary: size of the vocabulary.
        before, after: number of tokens of the trajectory before and after the response.
        key: the trajectory's name, for errors.

    Returns:
        Masks with before + R + after rows.

    Raises:
        TrajectoryRejected: "no_mask" if there is none, "length_mismatch" for a wrong number of lists, "bad_mask" for too many ids or ids
            that are repeated or outside the vocabulary, "mask_without_token" if a token is not among the ids it was sampled from.
    """
    if lists is None:
        raise TrajectoryRejected("no_mask", f"{key}: the engine sent no sampling mask")
    if len(lists) != len(response):
        raise TrajectoryRejected("length_mismatch", f"{key}: got masks of {len(lists)} tokens, expected {len(response)}")
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    if (counts == 0).any():
        raise TrajectoryRejected("mask_without_token", f"{key}: response token {int(np.argmin(counts))}: the mask is empty")
    total = int(counts.sum())
    if total >= 1 << 31:
        raise TrajectoryRejected("bad_mask", f"{key}: got {total} ids, expected fewer than 2^31")
    ids = np.fromiter(chain.from_iterable(lists), np.int64, total)
    rows = np.repeat(np.arange(len(lists)), counts)
    ids = ids[np.lexsort((ids, rows))]
    repeated = (ids[1:] == ids[:-1]) & (rows[1:] == rows[:-1])
    outside = (ids < 0) | (ids >= vocabulary)
    for wrong, what in ((outside, f"outside the vocabulary of {vocabulary}"), (repeated, "repeated")):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise TrajectoryRejected("bad_mask", f"{key}: response token {rows[at]}: id {ids[at]} is {what}")
    made = Masks(_offsets(counts, 0, 0), ids.astype(np.int32), vocabulary)
    missing = token_outside(made, response)
    if missing is not None:
        detail = f"response token {missing}: {response[missing]} is not among the {counts[missing]} ids it was sampled from"
        raise TrajectoryRejected("mask_without_token", f"{key}: {detail}")
    return Masks(_offsets(counts, before, after), made.ids, vocabulary)


def _offsets(counts: np.ndarray, before: int, after: int) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(np.pad(counts, (before, after))))).astype(np.int32)
