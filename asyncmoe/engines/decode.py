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
from asyncmoe.trajectory import Buffer, Routes, Routing, encode_routes, expect_valid
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


def sampling_masks(lists: IdLists | None, size: int, key: str) -> IdLists:
    """Return the ids from which each token of a response was sampled, ascending for each token.

    `encode_masks` refuses ids that are repeated or outside the vocabulary, and `validate` a token that is not among its ids.

    Args:
        lists: `meta_info.output_token_sampling_mask`.
        size: number of tokens of the response.
        key: the trajectory's name, for errors.

    Raises:
        TrajectoryRejected: "no_mask" if there is none, "length_mismatch" for a wrong number of lists, "mask_without_token" for an empty
            one, which would stand for the whole vocabulary.
    """
    if lists is None:
        raise TrajectoryRejected("no_mask", f"{key}: the engine sent no sampling mask")
    if len(lists) != size:
        raise TrajectoryRejected("length_mismatch", f"{key}: got masks of {len(lists)} tokens, expected {size}")
    if (lists.counts == 0).any():
        raise TrajectoryRejected("mask_without_token", f"{key}: response token {int(np.argmin(lists.counts))}: the mask is empty")
    rows = np.repeat(np.arange(size), lists.counts)
    return IdLists(lists.counts, lists.ids[np.lexsort((lists.ids, rows))])
