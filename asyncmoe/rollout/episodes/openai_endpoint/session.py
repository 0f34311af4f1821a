"""One episode behind an endpoint: turns requests into input of the episode's agents, and the agents' responses into answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from asyncmoe.errors import DataError, TrajectoryRejected
from asyncmoe.rollout.async_tasks import begun, cancelled
from asyncmoe.rollout.episodes.environment import TOO_LONG, Agent, Episode, Response
from asyncmoe.rollout.episodes.openai_endpoint import conversation
from asyncmoe.rollout.episodes.openai_endpoint.chat import ChatApi
from asyncmoe.rollout.episodes.openai_endpoint.conversation import Conversation, Message, NewContent
from asyncmoe.rollout.episodes.openai_endpoint.messages import MessagesApi
from asyncmoe.rollout.episodes.openai_endpoint.parameters import Api, Fields
from asyncmoe.rollout.episodes.openai_endpoint.request import MODEL, Completion, CompletionRequest, RequestRefused, assistant, wrong
from asyncmoe.rollout.episodes.openai_endpoint.responses import ResponsesApi
from asyncmoe.rollout.episodes.tools.calls import CLOSE, HERMES, OPEN, Call, find, opening, read_calls, written_id

CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
_NAME = re.compile(r"[\w.:@/-]{1,64}", re.ASCII)
"""A `model` that can name an agent, and so become a header. Any other means `MODEL`."""


@dataclass(eq=False)
class _Line:
    """One path of a conversation, and the agent it is trained as.

    Attributes:
        name: the `model` of its requests.
        first: messages of the first request of its tree.
        known: the conversation up to each of its answers, in order; paths share the objects before their fork.
        seen: tokens that an unanswered request gave the agent; the path accepts only the same request again.
        busy: True while a request is being answered.
    """

    agent: Agent
    name: str
    first: tuple[Message, ...]
    known: list[Conversation] = field(default_factory=list)
    seen: tuple[int, ...] | None = None
    busy: bool = False

    def takes(self, given: NewContent, count: int) -> bool:
        """Return True if this path can answer a request that adds `given` after its first `count` answers."""
        return not self.busy and len(self.known) == count and self.seen in (None, given.tokens)


class Session:
    """The requests of one episode.

    A request's `model` names its agent. Among the conversations of that name, the request continues the longest that it begins with: at the
    end of a path it extends the path; elsewhere, or while another request extends that path, it forks a new one, "policy/2" and so on. A
    request that repeats the first request's messages but no answer becomes a path of the same tree that shares no response; any other
    request begins another agent, also with the next number. The episode limits agents, paths and their length (`environment.max_agents`,
    `max_paths`, `max_turns`, `max_tokens`). A cancelled request can be repeated; a different request in its place forks.

    Attributes:
        key: its API key.
        apis: the APIs it serves, by the last parts of their URL paths.
    """

    def __init__(self, episode: Episode, style: str = HERMES) -> None:
        self.key = secrets.token_urlsafe(32)
        self.apis: Mapping[str, Api] = {CHAT: ChatApi(), RESPONSES: ResponsesApi(), MESSAGES: MessagesApi()}
        self._episode, self._style = episode, style
        self._lines: list[_Line] = []
        self._answering: set[asyncio.Task[Completion]] = set()
        self._over = False

    def parse(self, api: Api, body: bytes) -> tuple[CompletionRequest, Sequence[str]]:
        """Parse a request; also return the names of overridden parameters, including those that the chat template leaves out. A response
        cannot end with its first call if only an engine can read calls, because the engine reads them afterwards.

        Raises:
            RequestRefused: as `Api.parse`, or the chat template has no such variable.
        """
        fields, tokenizer = Fields(body, self._episode.sampling), self._episode.tokenizer
        asked, hermes = api.parse(fields), self._style == HERMES
        fields.override("parallel_tool_calls", asked.one_call and not hermes)
        named = any("name" in message and message["role"] != "tool" for message in asked.asked.messages)
        for kind, sent in (("tools", asked.asked.tools), ("name", named)):
            fields.override(kind, sent and tokenizer.lacks(kind))
        if (unused := tokenizer.unused(asked.asked.variables)) is not None:
            raise wrong(f"chat_template_kwargs.{unused[:100]}", "is not a variable of the chat template. Leave it out")
        if hermes and tokenizer.lacks("tool_calls"):
            asked = replace(asked, asked=replace(asked.asked, rendered=tuple(map(_in_text, asked.asked.rendered))))
        return replace(asked, one_call=asked.one_call and hermes), fields.overridden

    def count(self, request: CompletionRequest) -> int:
        """Return the number of tokens that a request has as the first of a conversation.

        Raises:
            RequestRefused: 400: the chat template cannot render the messages.
        """
        try:
            return len(conversation.begin(request.asked, self._episode.tokenizer).tokens)
        except DataError as error:
            raise _unrendered(error) from error

    async def answer(self, request: CompletionRequest) -> Completion:
        """Return the policy's response to a request.

        Raises:
            RequestRefused: 400: the chat template cannot render the messages, or a limit of the episode leaves no room. 503: the episode
                cannot continue, or is over.
        """
        if self._over:
            raise _over()
        try:
            return await begun(self._answer(request), self._answering)
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise
            raise _over() from None

    async def close(self) -> None:
        """End all requests."""
        self._over = True
        await cancelled(self._answering)

    async def _answer(self, request: CompletionRequest) -> Completion:
        stops = (*request.stops, CLOSE) if request.one_call else request.stops
        try:
            line, given = self._place(request)
            line.busy = True
            try:
                if line.seen is None:
                    line.agent.see(given.tokens)
                    line.seen = given.tokens
                ends = partial(_ends, opening(given.tokens, self._episode.tokenizer)) if request.one_call else None
                response = await line.agent.respond(max_new_tokens=request.most, stop=stops or None, ends=ends)
                answer = await self._settled(request, line, given, response)
            finally:
                line.busy = False
        except TrajectoryRejected as rejected:
            # Clients retry a 503, even those that ignore x-should-retry, but no retry can make room.
            raise RequestRefused(400 if rejected.reason == TOO_LONG else 503, str(rejected), code=rejected.reason) from rejected
        except DataError as error:
            raise _unrendered(error) from error
        return answer

    async def _settled(self, request: CompletionRequest, line: _Line, given: NewContent, response: Response) -> Completion:
        """Return the answer, and record it in its path. It is recorded even if its calls cannot be read or its client has left: a repeated
        request forks."""
        message = assistant(response.text, ())
        try:
            answer = await self._completion(request, line.agent, response)
            message = answer.message
        finally:
            line.seen = None
            line.known.append(conversation.answered(given, message, response.tokens, response.finish, self._episode.tokenizer))
        return answer

    async def _completion(self, request: CompletionRequest, agent: Agent, response: Response) -> Completion:
        stopped_by = response.stopped_by if response.stopped_by in request.stops else None
        text, calls = response.text if stopped_by is None else response.text.partition(stopped_by)[0], list[dict[str, str]]()
        if request.calls:
            found, text = await read_calls(agent, response, self._style, request.asked.tools, text)
            before = sum(len(message.get("tool_calls", ())) for message in request.asked.messages)
            calls = [_named(call, self._style, number) for number, call in enumerate((one for one in found if not one.wrong), before)]
        finish = "tool_calls" if calls else response.finish
        sampled = len(response.tokens)
        return Completion(text, tuple(calls), finish, len(agent.answered) - sampled, sampled, stopped_by, agent.name)

    def _place(self, request: CompletionRequest) -> tuple[_Line, NewContent]:
        """Return the path that answers a request, and the request's new content."""
        asked, tokenizer = request.asked, self._episode.tokenizer
        named = request.model if _NAME.fullmatch(request.model) else MODEL
        own = [line for line in self._lines if line.name == named]
        for known, (line, count) in _recorded(own).items():
            more = conversation.extend(known, asked, tokenizer)
            if more is not None:
                return _free(own, more, count, known) or self._fork(line, count), more
        given = conversation.begin(asked, tokenizer)
        if (free := _free(own, given, 0)) is not None:
            return free, given
        same = [line for line in own if asked.messages[: len(line.first)] == line.first]
        if same:
            return self._fork(max(same, key=lambda line: len(line.first)), 0), given
        line = _Line(self._episode.agent(self._free_name(named)), named, asked.messages)
        self._lines.append(line)
        return line, given

    def _fork(self, line: _Line, count: int) -> _Line:
        """Begin a path that shares the first `count` answers of `line`."""
        made = _Line(self._episode.fork(line.agent, count, self._free_name(line.name)), line.name, line.first, line.known[:count])
        self._lines.append(made)
        return made

    def _free_name(self, name: str) -> str:
        """Return a name that no agent has: this name, or this name with the next free number."""
        names = (name if number == 1 else f"{name}/{number}" for number in itertools.count(1))
        return next(one for one in names if one not in self._episode.agents)


def _recorded(lines: Sequence[_Line]) -> dict[Conversation, tuple[_Line, int]]:
    """Return all conversations up to an answer, the longest first, each with a path that contains it and its number of answers."""
    found: dict[Conversation, tuple[_Line, int]] = {}
    for line in lines:
        for number, known in enumerate(line.known, start=1):
            found.setdefault(known, (line, number))
    return dict(sorted(found.items(), key=lambda one: len(one[0].text), reverse=True))


def _free(lines: Sequence[_Line], given: NewContent, count: int, known: Conversation | None = None) -> _Line | None:
    """Return a path that ends with `known` (None: that has no answer yet) and can answer a request that adds `given` to it."""
    return next((line for line in lines if line.takes(given, count) and (known is None or line.known[-1] is known)), None)


def _named(call: Call, style: str, number: int) -> dict[str, str]:
    """Give a call, numbered within its conversation, an id that its family's chat templates accept; Mistral's accept only nine letters or
    digits."""
    chance = secrets.token_hex(9)[:9] if style == "mistral" else f"call_{secrets.token_hex(12)}"
    name = str(call.name)
    return {"id": written_id(style, name, number) or chance, "name": name, "arguments": call.arguments}


def _in_text(message: Message) -> Message:
    """Return a message with its calls in its text as the policy writes them, for a template that leaves calls out."""
    calls = [f"{OPEN}{json.dumps(call['function'], ensure_ascii=False)}{CLOSE}" for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": (), "content": "\n".join(filter(None, [message["content"], *calls]))} if calls else message


def _ends(opening: str, said: str) -> bool:
    """Return whether a stop text ends a response: the end of a call within a thought does not."""
    return not said.endswith(CLOSE) or bool(find(said, HERMES, opening))


def _over() -> RequestRefused:
    return RequestRefused(503, "the episode is over", code="episode_over")


def _unrendered(error: DataError) -> RequestRefused:
    return RequestRefused(400, str(error), parameter="messages", code="unsupported_or_invalid")
