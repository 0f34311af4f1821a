"""Decodes the routes and sampling masks of a `Generation` into their recorded form.

Routes: `meta_info.routed_experts` has a row for each token of prompt and response, from index `start` on, except the last token, which has
not passed through the model. `start` is the request's `routed_experts_start_len`, at most the length of its prompt; the engine lowers it to
the number of tokens - 1. An engine that this program started packs routes that fit (`asyncmoe.trajectory.sent_routes`); unchanged
SGLang 0.5.23 sends int32[rows, num_hidden_layers, top_k] in C order (`sglang/srt/state_capturer`), dense layers included.

Masks: `meta_info.output_token_sampling_mask`, a list of ids for every token of the response, in no particular order
(`sglang/srt/sampling/sampling_mask.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncmoe.engines.types import Generation, IdLists, VersionSpan
from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory import Buffer, Masks, Routes, Routing, encode_routes, expect_valid, token_outside
from asyncmoe.trajectory.sent_routes import MAGIC, first_rows, from_bytes, to_bytes


def cut(generation: Generation, keep: int, before: int) -> Generation:
    """Truncate a response to its first `keep` tokens, as if no token had been sampled after them.

    A token depends only on the tokens before it, so the kept tokens have the distribution and the log-probabilities of a response whose
    sampling ended there.

    Args:
        keep: number of tokens, from 1 to the response's length.
        before: number of prompt tokens whose routes the answer contains.
    """
    size = len(generation.tokens)
    if keep == size:
        return replace(generation, finish="stop")
    spans = tuple(VersionSpan(span.version, span.start, min(span.end, keep)) for span in generation.spans if span.start < keep)
    masks = None if generation.masks is None else generation.masks.first(keep)
    routes = None if generation.routes is None else _first_rows(generation.routes, before + keep - 1, before + size - 1)
    return replace(
        generation,
        tokens=generation.tokens[:keep],
        logprobs=generation.logprobs[:keep],
        spans=spans,
        finish="stop",
        masks=masks,
        routes=routes,
        top=None if generation.top is None else generation.top[:keep],
    )


def _first_rows(sent: Buffer, keep: int, rows: int) -> Buffer:
    """Return the first `keep` of `rows` rows. Bytes that do not hold `rows` rows are returned unchanged, and rejected later."""
    if not _is_packed(sent):
        return sent if len(sent) % rows else sent[: len(sent) // rows * keep]
    try:
        routes = from_bytes(sent, "a response")
        return to_bytes(first_rows(routes, keep, "a response")) if routes.rows == rows else sent
    except ProtocolError:
        return sent


def _is_packed(sent: Buffer) -> bool:
    return bytes(memoryview(sent)[: len(MAGIC)]) == MAGIC


def routed_experts(sent: Buffer | None, routing: Routing, *, tokens: int, routed: int, key: str) -> Routes:
    """Read the routes in an answer.

    Args:
        sent: `meta_info.routed_experts`.
        tokens: number of tokens of prompt and response.
        routed: number of leading rows that the request excluded (`routed_experts_start_len`), because earlier turns have them.
        key: the trajectory's name, for errors.

    Returns:
        Routes of tokens - 1 - routed rows.

    Raises:
        TrajectoryRejected: "no_routes" if there are none, "routes_malformed" for packed routes that are damaged or invalid,
            "routes_wrong_layers" for layers or experts that differ from `routing`, "length_mismatch" for a wrong number of rows; or as
            `encode_routes`.
    """
    if sent is None:
        raise TrajectoryRejected("no_routes", f"{key}: the engine sent no routes; it needs --enable-return-routed-experts")
    rows = tokens - 1 - routed
    if not _is_packed(sent):
        return encode_routes(_plain(sent, routing, rows, key), routing, key)
    try:
        routes = from_bytes(sent, key)
        expect_valid(routes, key)  # a nonexistent or repeated expert would stop the trainer
    except ProtocolError as error:
        raise TrajectoryRejected("routes_malformed", str(error)) from error
    if (routes.layers, routes.top_k, routes.experts) != (routing.layers, routing.top_k, routing.experts):
        got = f"{len(routes.layers)} layers with {routes.top_k} of {routes.experts} experts"
        expected = f"{len(routing.layers)} layers with {routing.top_k} of {routing.experts}"
        raise TrajectoryRejected("routes_wrong_layers", f"{key}: the engine packed routes of {got}, expected {expected}")
    if routes.rows != rows:
        raise TrajectoryRejected("length_mismatch", f"{key}: got packed routes of {routes.rows} tokens, expected {rows}")
    return routes


def _plain(sent: Buffer, routing: Routing, rows: int, key: str) -> np.ndarray:
    """Return routes that the engine did not pack: int32[rows, all_layers, top_k]."""
    row = routing.all_layers * routing.top_k * 4
    if len(sent) == rows * row:
        return np.frombuffer(sent, "<i4").reshape(rows, routing.all_layers, routing.top_k)
    if rows and len(sent) % row and len(sent) % (4 * rows) == 0:
        detail = f"{len(sent) // 4 // rows} experts a token in all layers, expected {routing.top_k} in each of {routing.all_layers} layers"
        raise TrajectoryRejected("routes_wrong_layers", f"{key}: got {detail}")
    raise TrajectoryRejected("length_mismatch", f"{key}: got {len(sent)} bytes of routes, expected {rows} rows of {row} bytes")


def sampling_masks(lists: IdLists | None, response: np.ndarray, vocabulary: int, *, before: int, after: int, key: str) -> Masks:
    """Return the masks of a trajectory with one response: the rows of tokens outside it stand for the whole vocabulary.

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
    counts = lists.counts.astype(np.int64)
    if (counts == 0).any():
        raise TrajectoryRejected("mask_without_token", f"{key}: response token {int(np.argmin(counts))}: the mask is empty")
    total = int(counts.sum())
    if total >= 1 << 31:
        raise TrajectoryRejected("bad_mask", f"{key}: got masks of {total} ids, expected fewer than 2^31")
    ids = lists.ids.astype(np.int64)
    rows = np.repeat(np.arange(len(lists)), counts)
    ids = ids[np.lexsort((ids, rows))]
    repeated = (ids[1:] == ids[:-1]) & (rows[1:] == rows[:-1])
    outside = (ids < 0) | (ids >= vocabulary)
    for wrong, what in ((outside, f"outside the vocabulary of {vocabulary}"), (repeated, "repeated")):
        if wrong.any():
            at = int(np.argmax(wrong))
            raise TrajectoryRejected("bad_mask", f"{key}: response token {rows[at]}: id {ids[at]} of its mask is {what}")
    made = Masks(_offsets(counts, 0, 0), ids.astype(np.int32), vocabulary)
    missing = token_outside(made, response)
    if missing is not None:
        detail = f"response token {missing}: id {response[missing]} is not among the {counts[missing]} ids from which it was sampled"
        raise TrajectoryRejected("mask_without_token", f"{key}: {detail}")
    return Masks(_offsets(counts, before, after), made.ids, vocabulary)


def _offsets(counts: np.ndarray, before: int, after: int) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(np.pad(counts, (before, after))))).astype(np.int32)
