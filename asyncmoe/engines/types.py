"""The data of a request to an engine and of its response: plain, the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np

from asyncmoe.errors import EngineError
from asyncmoe.trajectory import NOTHING, Buffer, Recording

Tokens = Sequence[int] | np.ndarray
"""Token ids; an array is int32[n]."""
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
"""A kind of an engine's memory that it can release."""
ABORTED = "abort"
"""`Generation.finish` of a response that `Engine.abort` ended."""


class EngineLost(EngineError):
    """The engine did not answer: its process or the connection to it is gone."""


@dataclass(frozen=True)
class Sampling:
    """How a response is sampled, and which data is recorded with it.

    There is no seed per request: SGLang honors `sampling_seed` only with --enable-deterministic-inference
    (`sampling_batch_info.py`), which CPU and many GPU backends lack. Each engine is seeded as a whole instead, so a response
    depends on how requests were batched.

    Attributes:
        temperature: divides the logits; > 0.
        max_new_tokens: maximum length of the response, which then ends with finish "length".
        stop: token ids that end a response, together with those of the model's generation_config.json; the stop token is part of the
            response. If `stop` is empty, only the length ends a response.
        top_p, top_k, min_p: as in `RolloutSection`; by default, tokens are drawn from the whole vocabulary.
        recording: additional data that the engine reports.
    """

    temperature: float
    max_new_tokens: int
    stop: tuple[int, ...]
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    recording: Recording = NOTHING


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` (exclusive) were sampled with weights `version`, the engine's version string at that time."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class IdLists:
    """A list of ids for each token of a response, as an engine sent them.

    Attributes:
        counts: int32[R], number of ids in each list.
        ids: int32[n], the ids of all lists, in no particular order within one.
    """

    counts: np.ndarray
    ids: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def first(self, count: int) -> IdLists:
        """Return the first `count` lists."""
        return IdLists(self.counts[:count], self.ids[: int(self.counts[:count].sum())])


@dataclass(frozen=True, eq=False)
class Generation:
    """One response.

    Attributes:
        tokens: int32[R], sampled token ids, including the stop token if `finish` is "stop".
        logprobs: float32[R], natural log-probabilities: softmax of logits / temperature over the ids of the sampling mask if masks are
            recorded, else over the whole vocabulary.
        spans: the version that sampled each range of tokens; cover 0 to R without a gap.
        finish: "stop", "length", or `ABORTED` if `abort` ended it; an aborted response may have no tokens.
        cached_tokens: number of prompt tokens whose keys and values came from the prefix cache.
        routes, masks: in the forms that `asyncmoe.engines.decode` reads, if requested.
        top: TOP[R, K], if requested: the most probable ids of each token, as `Trajectory.top`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]
    finish: str
    cached_tokens: int
    routes: Buffer | None = None
    masks: IdLists | None = None
    top: np.ndarray | None = None


class ParsedCall(msgspec.Struct, frozen=True):
    """A tool call in a response, as the engine's parser reads it.

    Attributes:
        parameters: the call's arguments as JSON text.
        rest: the response's text without its calls; the same for all of its calls.
    """

    name: str
    parameters: str
    rest: str = ""


class Listener(Protocol):
    """Receives a response while it is sampled, and may end it.

    Attributes:
        every: number of tokens sampled between two calls of `hear`; a hint to the engine.
        kept: number of tokens after which the listener ended the response; None: it did not.
        live: False if `forget` may still take back the tokens heard.
    """

    every: int
    kept: int | None
    live: bool

    def hear(self, tokens: Sequence[int]) -> bool:
        """Receive the next sampled tokens; return True, and set `kept`, if the response ends with one of them."""

    def forget(self) -> None:
        """Forget all tokens: the response begins again."""
