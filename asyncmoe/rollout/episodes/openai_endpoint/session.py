"""One episode behind an endpoint: requests into what its agents see, and their responses into answers."""

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
        known: what was answered; None: nothing yet.
        seen: tokens the agent was given by a request that is not answered: the same may be asked again, nothing else.
    """

    agent: Agent
    known: Conversation | None = None
    seen: tuple[int, ...] | None = None
    busy: bool = False

    def takes(self, given: NewContent) -> bool:
        """Whether a request that adds this to the conversation may be answered in it."""
        return self.seen in (None, given.tokens)


class Session:
    """The requests of one episode.

    The first conversation is that of the agent "policy". A request that continues none of those known begins the next, "policy/2" and so
    on; how many there may be, and how long they may become, is the episode's to say (`environment.max_agents`, `max_turns`, `max_tokens`).
    A request that is cancelled can be repeated; with any other in its place, another conversation begins.

    Attributes:
        name: in its URL.
        key: its secret.
        requests: that were counted.
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
        """What the policy says.

        Raises:
            Refused: 400: the chat template cannot render the messages. 503: the episode cannot go on, or is over.
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
        """The conversation a request continues, the longest where there are several, or a new one."""
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
