"""Decodes the routes and sampling masks of a `Generation` into their recorded form.

Routes: `meta_info.routed_experts` has a row for each token of prompt and response, from index `start` on, except the last token, which has
not passed through the model. `start` is the request's `routed_experts_start_len`, at most the length of its prompt; the engine lowers it to
the number of tokens - 1. The engine packs routes (`asyncmoe.trajectory.sent_routes`), or says why they do not fit the model.

Masks: `meta_info.output_token_sampling_mask`, a list of ids for every token of the response, in no particular order
(`sglang/srt/sampling/sampling_mask.py`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncmoe.engines.types import Generation, IdLists, VersionSpan
from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.trajectory import Buffer, Routes, Routing, expect_valid
from asyncmoe.trajectory.sent_routes import first_rows, from_bytes, to_bytes


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
    try:
        routes = from_bytes(sent, "a response")
        return to_bytes(first_rows(routes, keep, "a response")) if routes.rows == rows else sent
    except ProtocolError:
        return sent


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
        TrajectoryRejected: "no_routes" if there are none, "routes_malformed" for routes that the engine could not pack, or that are damaged
            or invalid, "routes_wrong_layers" for layers or experts that differ from `routing`, "length_mismatch" for wrong rows.
    """
    if sent is None:
        raise TrajectoryRejected("no_routes", f"{key}: the engine sent no routes; it needs --enable-return-routed-experts")
    try:
        routes = from_bytes(sent, key)
        expect_valid(routes, key)  # a nonexistent or repeated expert would stop the trainer
    except ProtocolError as error:
        raise TrajectoryRejected("routes_malformed", str(error)) from error
    if (routes.layers, routes.top_k, routes.experts) != (routing.layers, routing.top_k, routing.experts):
        got = f"{len(routes.layers)} layers with {routes.top_k} of {routes.experts} experts"
        expected = f"{len(routing.layers)} layers with {routing.top_k} of {routing.experts}"
        raise TrajectoryRejected("routes_wrong_layers", f"{key}: the engine packed routes of {got}, expected {expected}")
    if routes.rows != (rows := tokens - 1 - routed):
        raise TrajectoryRejected("length_mismatch", f"{key}: got packed routes of {routes.rows} tokens, expected {rows}")
    return routes


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
