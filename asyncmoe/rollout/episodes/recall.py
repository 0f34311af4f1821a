"""Answers the requests of an episode that begins again after a restart of its run: with what was recorded, as far as that goes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from asyncmoe.journal.turns import EpisodeKey, Turns
from asyncmoe.rollout.engines.pool import Pool, PooledGeneration
from asyncmoe.rollout.engines.scheduling import UNKNOWN, ScheduledRequest
from asyncmoe.rollout.engines.types import ABORTED, Listener, Sampling

_FORM = 2
"""Of a recorded answer; those of another form are asked for again."""
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Recall:
    """The pool, for the requests of one episode; it records every answer.

    Attributes:
        resumes: a response that was cut short is continued, so that its first part is an answer too.
    """

    pool: Pool
    turns: Turns
    key: EpisodeKey
    resumes: bool

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        routed: int = 0,
        request: ScheduledRequest = UNKNOWN,
        listener: Listener | None = None,
    ) -> PooledGeneration:
        """Answer a request that was recorded; ask the pool otherwise, as `Pool.generate`, and record its answer.

        Raises:
            TrajectoryRejected, EngineError: as `Pool.generate`.
            StorageError: the answer cannot be recorded, because the disk failed.
        """
        digest = self._digest(tokens, sampling, routed)
        recorded = await self.turns.recall(self.key, digest)
        if recorded is not None:
            answer = msgspec.msgpack.decode(recorded, type=PooledGeneration)
            if listener is not None:
                listener.hear(answer.generation.tokens)
            self.pool.recalled_tokens += len(answer.generation.tokens)
            return answer
        answer = await self.pool.generate(tokens, sampling, routed, request=request, listener=listener)
        ended = listener is not None and listener.kept is not None
        if self.resumes or ended or answer.generation.finish != ABORTED:
            await self.turns.record(self.key, digest, msgspec.msgpack.encode(answer))
        return answer

    def _digest(self, tokens: Sequence[int], sampling: Sampling, routed: int) -> bytes:
        """Return the digest of all that a request asks, but for what the whole run records of each token."""
        asked = (sampling.temperature, sampling.max_new_tokens, sampling.stop, sampling.top_p, sampling.top_k, sampling.min_p)
        terms = repr((*asked, routed, self.resumes, _FORM)).encode()
        return blake2b(terms + array("q", tokens).tobytes(), digest_size=_DIGEST_BYTES).digest()
