"""A response of an engine, given as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from asyncmoe.engines.types import Generation, IdLists, VersionSpan
from asyncmoe.platform.sglang.packed_answers import lists
from asyncmoe.trajectory import Buffer


def generation_of(
    tokens: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[VersionSpan],
    finish: str,
    cached_tokens: int = 0,
    routes: Buffer | None = None,
    masks: Sequence[Sequence[int]] | None = None,
) -> Generation:
    """Return a response with these numbers."""
    arrays = np.array(tokens, np.int32), np.array(logprobs, np.float32)
    return Generation(*arrays, tuple(spans), finish, cached_tokens, routes, None if masks is None else IdLists(*lists(masks)))
