"""Recorded answers: an episode that begins again after a restart of its run gets them for the requests that it repeats."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np

from asyncmoe.engines.pool import Pool, PooledGeneration
from asyncmoe.engines.scheduling import UNKNOWN, ScheduledRequest
from asyncmoe.engines.types import ABORTED, Generation, IdLists, Listener, Sampling, Tokens, VersionSpan
from asyncmoe.log.turns import EpisodeId, Turns
from asyncmoe.trajectory import TOP

_FORM = 4
"""Version of the record format; answers recorded in another format are requested again."""
_DIGEST_BYTES = 16


class _Recorded(msgspec.Struct, frozen=True, array_like=True):
    """A `PooledGeneration`: its salt, then the fields of the generation, where arrays are little-endian bytes."""

    salt: int
    tokens: bytes
    logprobs: bytes
    spans: tuple[VersionSpan, ...]
    finish: str
    cached_tokens: int
    routes: bytes | None
    masks: tuple[bytes, bytes] | None
    top: bytes | None


@dataclass(frozen=True)
class Recall:
    """Takes the pool's place for the requests of one episode, and records every answer.

    Attributes:
        resumes: an aborted response is continued, so its first part is recorded, too.
    """

    pool: Pool
    turns: Turns
    key: EpisodeId
    resumes: bool

    async def generate(
        self,
        tokens: Tokens,
        sampling: Sampling,
        routed: int = 0,
        request: ScheduledRequest = UNKNOWN,
        listener: Listener | None = None,
    ) -> PooledGeneration:
        """Return the recorded answer to a request, if any; otherwise ask the pool, as `Pool.generate`, and record its answer.

        Raises:
            TrajectoryRejected, EngineError: as `Pool.generate`.
            StorageError: the answer cannot be recorded, because the disk failed.
        """
        digest = self._digest(tokens, sampling, routed)
        recorded = await self.turns.recall(self.key, digest)
        if recorded is not None:
            answer = _decoded(recorded)
            if listener is not None:
                listener.hear(answer.generation.tokens.tolist())
            self.pool.recalled_tokens += len(answer.generation.tokens)
            return answer
        answer = await self.pool.generate(tokens, sampling, routed, request=request, listener=listener)
        ended = listener is not None and listener.kept is not None
        if self.resumes or ended or answer.generation.finish != ABORTED:
            await self.turns.record(self.key, digest, _encoded(answer))
        return answer

    def _digest(self, tokens: Tokens, sampling: Sampling, routed: int) -> bytes:
        """Return the digest of everything in a request except what the run records of each token."""
        asked = (sampling.temperature, sampling.max_new_tokens, sampling.stop, sampling.top_p, sampling.top_k, sampling.min_p)
        terms = repr((*asked, routed, self.resumes, _FORM)).encode()
        return blake2b(terms + np.asarray(tokens, "<i8").tobytes(), digest_size=_DIGEST_BYTES).digest()


def _encoded(answer: PooledGeneration) -> bytes:
    g = answer.generation
    masks = None if g.masks is None else (g.masks.counts.astype("<i4").tobytes(), g.masks.ids.astype("<i4").tobytes())
    routes = None if g.routes is None else bytes(g.routes)
    tokens, logprobs = g.tokens.astype("<i4").tobytes(), g.logprobs.astype("<f4").tobytes()
    top = None if g.top is None else g.top.tobytes()
    return msgspec.msgpack.encode(_Recorded(answer.salt, tokens, logprobs, g.spans, g.finish, g.cached_tokens, routes, masks, top))


def _decoded(recorded: bytes) -> PooledGeneration:
    r = msgspec.msgpack.decode(recorded, type=_Recorded)
    tokens, logprobs = np.frombuffer(r.tokens, "<i4"), np.frombuffer(r.logprobs, "<f4")
    masks = None if r.masks is None else IdLists(*(np.frombuffer(part, "<i4") for part in r.masks))
    top = None if r.top is None else np.frombuffer(r.top, TOP).reshape(len(tokens), len(r.top) // TOP.itemsize // max(len(tokens), 1))
    return PooledGeneration(Generation(tokens, logprobs, r.spans, r.finish, r.cached_tokens, r.routes, masks, top), r.salt)
