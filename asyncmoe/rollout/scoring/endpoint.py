"""A judge behind an HTTP endpoint that receives a sample and returns its score, both as JSON."""

from __future__ import annotations

import msgspec

from asyncmoe.rollout.scoring.http import Poster
from asyncmoe.rollout.scoring.types import Sample

_ANSWER_BYTES = 1 << 20


class HttpJudge:
    """See `Judge`. Posts {"prompt", "response", "answer", "agent"}; `parse_score.read_json` parses the answer."""

    width: int | None = None

    def __init__(self, url: str, timeout_s: float) -> None:
        self._poster = Poster(url, timeout_s)

    async def call(self, sample: Sample) -> object:
        """See `Judge`. Returns bytes."""
        told = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer, "agent": sample.agent}
        return await self._poster.post(msgspec.json.encode(told), _ANSWER_BYTES)

    async def close(self) -> None:
        """See `Judge`."""
        await self._poster.close()
