"""A judge behind an HTTP endpoint that receives a sample and returns its score, both as JSON; and the POST to any scoring server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import aiohttp

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.scoring.types import GARBAGE, SHOWN, TIMEOUT, UNAVAILABLE, Later, Sample
from asyncmoe.surroundings import proxy_for

_LATER = (429, 503)
_TIMED_OUT = 408
_KEEP_ALIVE_S = 2.0
_ANSWER_BYTES = 1 << 20


class Poster:
    """Posts JSON to one URL. The first call opens the HTTP session, inside the event loop.

    Args:
        url: complete URL; redirects are not followed.
        timeout_s: limit for one call, up to the last byte of its answer.
        key: sent as a bearer token, if not empty.
    """

    def __init__(self, url: str, timeout_s: float, key: str = "") -> None:
        self.url, self._timeout_s = url, timeout_s
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        # `LimitedScorer` limits the calls in flight. We close idle connections before the server does (uvicorn: after 5 s).
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        return aiohttp.ClientSession(connector=connector, proxy=proxy_for(self.url))

    async def post(self, body: bytes, max_bytes: int) -> bytes:
        """Return the body of an answer with status 200.

        Raises:
            Later: "scorer_unavailable": no connection, or status 429 or 503.
            TrajectoryRejected: "scorer_timeout"; "scorer_unavailable": a connection that breaks, or status 5xx or 408; "scorer_garbage":
                any other status, or an answer of more than `max_bytes`.
        """
        bound = aiohttp.ClientTimeout(self._timeout_s)
        try:
            async with self._session.post(self.url, data=body, headers=self._headers, timeout=bound, allow_redirects=False) as reply:
                text = await _bounded_body(reply.content, max_bytes)
        except TimeoutError as error:
            raise TrajectoryRejected(TIMEOUT, f"{self.url} took longer than {self._timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise Later(f"{self.url}: {error}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TrajectoryRejected(UNAVAILABLE, f"{self.url}: {error or type(error).__name__}") from error
        if reply.status != 200:
            detail = f"{self.url}: status {reply.status}: {text[:SHOWN].decode(errors='replace')}"
            if reply.status in _LATER:
                after = reply.headers.get("Retry-After", "")
                raise Later(detail, float(after[:9]) if after.isdecimal() else 0.0)
            raise TrajectoryRejected(UNAVAILABLE if reply.status >= 500 or reply.status == _TIMED_OUT else GARBAGE, detail)
        if len(text) > max_bytes:
            raise TrajectoryRejected(GARBAGE, f"{self.url} answered with more than {max_bytes} bytes")
        return text

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


@dataclass(frozen=True)
class HttpJudge:
    """See `Judge`.

    Attributes:
        asked: returns the body to post for a sample, and the maximum bytes of its answer.
    """

    poster: Poster
    asked: Callable[[Sample], tuple[bytes, int]]

    async def call(self, sample: Sample) -> object:
        """See `Judge`. Returns bytes."""
        return await self.poster.post(*self.asked(sample))

    async def close(self) -> None:
        """See `Judge`."""
        await self.poster.close()


def asked(sample: Sample) -> tuple[bytes, int]:
    """Return the body to post to a scorer, whose answer `parse_score.read_json` parses, and the maximum bytes of that answer."""
    told: dict[str, object] = {"prompt": sample.prompt, "response": sample.response, "answer": sample.answer, "agent": sample.agent}
    told["columns"] = dict(sample.columns)
    return json.dumps(told).encode(), _ANSWER_BYTES  # msgspec writes no integer of more than 64 bits


async def _bounded_body(content: aiohttp.StreamReader, max_bytes: int) -> bytes:
    """Return the body of an answer; reading stops once it exceeds `max_bytes`."""
    try:
        return await content.readexactly(max_bytes + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
