"""One episode behind an endpoint: turns requests into input of the episode's agents, and the agents' responses into answers."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from asyncmoe.errors import DataError, TrajectoryRejected
from asyncmoe.rollout.episodes.environment import Agent, Episode
from asyncmoe.rollout.episodes.openai_endpoint import conversation, protocol
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Conversation, NewContent
from asyncmoe.rollout.episodes.openai_endpoint.protocol import Completion, CompletionRequest, RequestRefused


@dataclass(eq=False)
class _Line:
    """A conversation and the agent it is trained as.

    Attributes:
        known: the conversation up to the last answer; None before the first answer.
        seen: tokens that an unanswered request gave the agent; only the same request may be repeated, no other.
        busy: True while a request is being answered.
    """

    agent: Agent
    known: Conversation | None = None
    seen: tuple[int, ...] | None = None
    busy: bool = False

    def takes(self, given: NewContent) -> bool:
        """Return True if this conversation can answer a request that adds `given` to it."""
        return self.seen in (None, given.tokens)


class Session:
    """The requests of one episode.

    The first conversation belongs to the agent "policy". A request that continues no known conversation begins the next, "policy/2" and so
    on; the episode limits their number and length (`environment.max_agents`, `max_turns`, `max_tokens`). A cancelled request can be
    repeated; a different request in its place begins another conversation.

    Attributes:
        name: its name in the URL.
        key: its API key.
        requests: number of requests so far.
    """

    def __init__(self, episode: Episode) -> None:
        self.name, self.key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self.requests = 0
        self._episode = episode
        self._lines: list[_Line] = []
        self._answering: set[asyncio.Task[Completion]] = set()
        self._over = False

    def parse(self, body: bytes) -> CompletionRequest:
        """See `protocol.parse`."""
        return protocol.parse(body, self._episode.sampling)

    async def answer(self, request: CompletionRequest) -> Completion:
        """Return the policy's response to a request.

        Raises:
            RequestRefused: 400: the chat template cannot render the messages. 503: the episode cannot continue, or is over.
        """
        if self._over:
            raise _over()
        answering = asyncio.create_task(self._answer(request))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            return await answering
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise
            raise _over() from None

    async def close(self) -> None:
        """End all requests."""
        self._over = True
        for answering in (ending := list(self._answering)):
            answering.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _answer(self, request: CompletionRequest) -> Completion:
        tokenizer = self._episode.tokenizer
        try:
            line, given = self._place(request)
            line.busy = True
            try:
                if line.seen is None:
                    line.agent.see(given.tokens)
                    line.seen = given.tokens
                seen = len(line.agent.tokens)
                response = await line.agent.respond(max_new_tokens=request.most)
            finally:
                line.busy = False
        except TrajectoryRejected as rejected:
            raise RequestRefused(503, str(rejected), code=rejected.reason) from rejected
        except DataError as error:
            raise RequestRefused(400, str(error), parameter="messages", code="unsupported_or_invalid") from error
        message = protocol.message_of(response.text, request.calls)
        line.seen = None
        line.known = conversation.answered(given, message, response.tokens, response.finish, tokenizer)
        finish = "tool_calls" if "tool_calls" in message else response.finish
        return Completion(message, finish, seen, len(response.tokens))

    def _place(self, request: CompletionRequest) -> tuple[_Line, NewContent]:
        """Return the longest conversation that a request continues, or a new conversation, and the request's new content."""
        tokenizer = self._episode.tokenizer
        free = [line for line in self._lines if not line.busy]
        for line in sorted(free, key=lambda line: len(line.known.text) if line.known else 0, reverse=True):
            more = conversation.extend(line.known, request.asked, tokenizer) if line.known else None
            if more is not None and line.takes(more):
                return line, more
        given = conversation.begin(request.asked, tokenizer)
        for line in free:
            if line.known is None and line.takes(given):
                return line, given
        number = len(self._lines) + 1
        line = _Line(self._episode.agent(protocol.MODEL if number == 1 else f"{protocol.MODEL}/{number}"))
        self._lines.append(line)
        return line, given


def _over() -> RequestRefused:
    return RequestRefused(503, "the episode is over", code="episode_over")
