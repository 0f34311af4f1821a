"""The interface between environments and the policy: episodes, agents and responses.

An environment is a small user-written class. It gives an agent tokens or text, and asks it for responses:

    class Guess:
        async def run(self, episode: Episode) -> float:
            agent = episode.agent()
            agent.see(episode.prompt.tokens)
            response = await agent.respond()
            return float(response.text.strip() == episode.prompt.answer)

Token in, token out: given and sampled tokens are kept as tokens and never decoded and encoded again, so training sees exactly the sampled
tokens. Given tokens are not trained on. An environment runs in a rollout worker's event loop beside other episodes, so it must not block
the loop (run blocking calls with `asyncio.to_thread`). While it waits for a tool or another agent instead of a response, it occupies no
engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from operator import index
from random import Random
from typing import Any, Protocol, runtime_checkable

import numpy as np

from asyncmoe.engines.types import Listener, ParsedCall, Sampling
from asyncmoe.errors import AsyncmoeError, TrajectoryRejected
from asyncmoe.rollout.episodes import turn_tree
from asyncmoe.rollout.episodes.listening import Listening, wrong_stop
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn
from asyncmoe.rollout.scoring.plain_answer import finite
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer
from asyncmoe.telemetry.samples.records import ToolCall

ERROR, TIMEOUT, TOO_LONG = "environment_error", "environment_timeout", "episode_too_long"

_NOTED = 2000
"""Characters noted of a tool's argument and of its answer."""
_ORDER = count()
"""Numbers the responses of all episodes as they end."""

Outcome = float | Mapping[str, Any] | None
"""A reward; None: the configured scorer scores every agent. Either may also come as {"reward": ..., "metrics": {name: number}}."""
Rewards = Outcome | Mapping[str, Outcome]
"""One outcome for all agents; or outcomes by name, where a path without one gets its agent's outcome."""


class Environment(Protocol):
    """One object for the whole run; many episodes run in it concurrently. An optional `async def close(self)` is called at its end."""

    async def run(self, episode: Episode) -> Rewards:
        """Run one episode, from prompt to end. An exception rejects the episode: for its own reason if an agent raised it, else `ERROR`."""


@runtime_checkable
class Demonstrator(Environment, Protocol):
    """An environment that can also demonstrate its task, as a warm-up needs."""

    def demonstrate(self, agent: Agent, episode: Episode) -> str:
        """Return the teacher's next message in this conversation. Random draws come from `episode.random`."""


@dataclass(frozen=True, eq=False)
class Response:
    """An agent's response.

    Attributes:
        text: the tokens decoded, including a stop text.
        finish: "stop", or "length" if `max_new_tokens` ended it.
        stopped_by: the stop text that ended it, or None.
        turns: the turns it was sampled in.
    """

    text: str
    finish: str
    stopped_by: str | None
    turns: tuple[Turn, ...]

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """The sampled token ids; computed on first access."""
        return tuple(token for turn in self.turns for token in turn.generation.tokens.tolist())

    @cached_property
    def logprobs(self) -> tuple[float, ...]:
        """Natural log-probability of each token, as in `Generation`; computed on first access."""
        return tuple(value for turn in self.turns for value in turn.generation.logprobs.tolist())


@dataclass(frozen=True)
class Bounds:
    """Limits of an episode: responses and tokens of one path, number of agents, and number of paths of one agent."""

    turns: int = 8
    tokens: int = 1 << 20
    agents: int = 8
    paths: int = 32


Speak = Callable[["Agent", tuple[int, ...], Sampling, Listener | None], Awaitable[list[Turn]]]
"""(agent, tokens given since its last response, sampling, listener) -> the turns of one response."""


Parse = Callable[[str, str, Sequence[Mapping[str, Any]]], Awaitable[Sequence[ParsedCall]]]
"""(text, parser, schemas of the tools) -> the tool calls in a response, as an engine's parser reads them."""


class Agent:
    """One conversation of the policy, or one path of a conversation that was forked (`Episode.fork`); becomes one trajectory.

    Attributes:
        name: its name in the environment.
        number: its index among the agents of the episode, the same for all paths of a tree; a group compares agents of the same number.
        tree: the name of the agent in whose tree it is a path; its own if it was not forked.
        branch: its index among the paths of its tree.
        turns: tokens given and sampled so far, as the engines answered.
        answered: int32[n], the tokens of `turns`: all but those given since its last response.
        responses: its responses so far, decoded.
        credits: {index of a sampled token: reward} of the steps that the environment rewarded.
        calls: tool calls that the environment made for it, for readers of samples.
        why: the scorer's explanation of its reward, for readers of samples.
        metrics: other numbers that its environment measured, by name.
        spoke_last: number of its last response, counted across episodes as responses end; -1 before the first.
        speaking: True while a response is in progress.
        episode: the episode it belongs to.
    """

    def __init__(self, episode: Episode, name: str, number: int, tree: str | None = None, branch: int = 0) -> None:
        self.name, self.number, self.tree, self.branch = name, number, tree or name, branch
        self.turns: list[Turn] = []
        self.answered = np.zeros(0, np.int32)
        self.responses: list[Response] = []
        self.credits: dict[int, float] = {}
        self.calls: list[ToolCall] = []
        self.why, self.spoke_last, self.speaking = "", -1, False
        self.metrics: Mapping[str, float] = {}
        self.episode, self._tokenizer = episode, episode.tokenizer
        self._given: list[int] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the conversation, given and sampled."""
        return (*self.answered.tolist(), *self._given)

    @property
    def text(self) -> str:
        """The whole conversation, decoded without special tokens."""
        return self._tokenizer.decode(self.tokens)

    def forked(self, name: str, branch: int, responses: int) -> Agent:
        """Return a new path that begins with this one's first `responses` responses and the tokens given before them."""
        if not 0 <= responses <= len(self.responses):
            raise self._failed(ERROR, f"fork: got {responses} responses, expected at most the agent's {len(self.responses)}")
        made = Agent(self.episode, name, self.number, self.tree, branch)
        made.responses = self.responses[:responses]
        made.turns = [turn for response in made.responses for turn in response.turns]
        made.answered = self.answered[: sum(map(len, made.turns))]
        return made

    @property
    def limit(self) -> str:
        """The limit of the episode that leaves no room for another response; "" if there is room."""
        bounds, size = self.episode.bounds, len(self.answered) + len(self._given)
        if len(self.responses) >= bounds.turns:
            return f"more than environment.max_turns = {bounds.turns} responses"
        return f"{size} tokens leave no room for a response within {bounds.tokens}" if size >= bounds.tokens else ""

    def see(self, what: str | Sequence[int]) -> None:
        """Give the agent text or tokens, also as an array; they are not trained on."""
        if self.speaking:
            raise self._failed(ERROR, "see() while a response is in progress")
        said: Any = self._tokenizer.encode(what) if isinstance(what, str) else what
        try:
            given = [*map(index, said.tolist() if hasattr(said, "tolist") else said)]
        except TypeError as error:
            raise self._failed(ERROR, f"see: got {what!r:.100}, expected text or a sequence of token ids") from error
        if outside := [token for token in given if not 0 <= token < self._tokenizer.vocabulary]:
            raise self._failed("token_out_of_vocabulary", f"see: got token {outside[0]}, expected ids below {self._tokenizer.vocabulary}")
        self._given += given

    def note_call(self, name: str | None, argument: str, observation: str, seconds: float) -> None:
        """Note a tool call for readers of samples (docs/guides/samples.md); `name`: None if it was no valid call."""
        texts = [text[:_NOTED].encode("utf-8", "replace").decode() for text in (argument, observation)]
        self.calls.append(ToolCall(name=name, argument=texts[0], observation=texts[1], seconds=round(seconds, 4)))

    def credit(self, reward: float) -> None:
        """Reward the agent's last step, which is its last response (`objective.process`)."""
        if not self.turns or self._given:
            raise self._failed(ERROR, "credit: got no response to reward, expected to be called right after one")
        try:
            self.credits[len(self.answered) - 1] = finite(reward)
        except ValueError as error:
            raise self._failed("bad_reward", f"credit: got {error}, expected a finite number") from error

    async def respond(
        self,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[int | str] | str | None = None,
        ends: Callable[[str], bool] | None = None,
    ) -> Response:
        """Sample a response to everything the agent has seen.

        Args:
            max_new_tokens: at most `rollout.max_new_tokens`, which is the default.
            stop: whole numbers are token ids that end the response instead of the end-of-sequence token; with an empty sequence, only
                `max_new_tokens` ends it. Texts are additional: the token that completes a text is the response's last, so all its tokens
                were sampled and are trained on, and text after the stop text within that token remains.
            ends: called with the response up to the end of a stop text; returns whether the response ends there. None: always.

        Raises:
            TrajectoryRejected: the episode cannot continue: it is too long, an engine failed, or a token is outside the vocabulary. An
                environment need not catch this; the episode ends with this reason in any case.
        """
        ids, texts = self._stops(stop)
        sampling = self._sampled_as(max_new_tokens, ids)
        listening = Listening(self._tokenizer, texts, ends) if texts else None
        self.speaking = True
        try:
            with self.episode.noting():
                made = await self.episode.speak(self, tuple(self._given), sampling, listening)
        finally:
            self.speaking = False
        self.turns += made
        added = [np.asarray(part, np.int32) for turn in made for part in (turn.given, turn.generation.tokens)]
        self.answered = np.concatenate((self.answered, *added))
        self._given, self.spoke_last = [], next(_ORDER)
        text = self._tokenizer.decode([token for turn in made for token in turn.generation.tokens.tolist()])
        stopped_by = None if listening is None else listening.stopped_by
        self.responses.append(Response(text, made[-1].generation.finish, stopped_by, tuple(made)))
        return self.responses[-1]

    def _stops(self, stop: Sequence[int | str] | str | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the token ids and the texts that end a response; the text of a special token becomes its id."""
        usual = self.episode.sampling.stop
        if stop is None:
            return usual, ()
        stop = (stop,) if isinstance(stop, str) else stop
        if (why := wrong_stop(stop, self._tokenizer.vocabulary)) is not None:
            raise self._failed(ERROR, f"respond: got stop {why}")
        ids, texts = [one for one in stop if not isinstance(one, str)], [one for one in stop if isinstance(one, str)]
        encoded = {text: self._tokenizer.encode(text) for text in texts}
        special = {text: tokens for text, tokens in encoded.items() if len(tokens) == 1 and not self._tokenizer.decode(tokens)}
        given = ids if ids or not stop else usual
        return (*given, *(token for (token,) in special.values())), tuple(text for text in texts if text not in special)

    def _sampled_as(self, max_new_tokens: int | None, stop: tuple[int, ...]) -> Sampling:
        sampling, bounds = self.episode.sampling, self.episode.bounds
        if self.speaking:
            raise self._failed(ERROR, "respond() while a response is in progress")
        if not self._given and not self.turns:
            raise self._failed(ERROR, "asked for a response before it has seen anything")
        if self.limit:
            raise self._failed(TOO_LONG, self.limit)
        wanted = sampling.max_new_tokens if max_new_tokens is None else min(max_new_tokens, sampling.max_new_tokens)
        if wanted <= 0:
            raise self._failed(ERROR, f"respond: got max_new_tokens {wanted}, expected at least 1")
        most = min(wanted, bounds.tokens - len(self.answered) - len(self._given))
        return replace(sampling, max_new_tokens=most, stop=stop)

    def _failed(self, reason: str, detail: str) -> AsyncmoeError:
        return self.episode.failed(reason, f"agent {self.name}: {detail}")


@dataclass(eq=False)
class Episode:
    """One episode, as its environment sees it.

    Attributes:
        place: its group, its number within the group, and the number of restarts.
        random: generator for the environment's own draws; the same run seed and place give the same draws.
        parse: the engines' parsers of tool calls; None without engines.
        agents: agents requested so far, by name.
        failure: the first failure of the episode or an agent, or None; any but `TrajectoryRejected` ends the run.
    """

    prompt: Prompt
    place: EpisodeId
    tokenizer: Tokenizer
    random: Random
    sampling: Sampling
    bounds: Bounds
    speak: Speak
    parse: Parse | None = None
    agents: dict[str, Agent] = field(default_factory=dict)
    failure: AsyncmoeError | None = None

    def agent(self, name: str = "policy") -> Agent:
        """Return the agent of this name, created on the first call."""
        if name not in self.agents:
            number = sum(not agent.branch for agent in self.agents.values())
            if number >= self.bounds.agents:
                raise self.failed(TOO_LONG, f"more than environment.max_agents = {self.bounds.agents} agents")
            self.agents[name] = Agent(self, name, number)
        return self.agents[name]

    def fork(self, agent: Agent, responses: int | None = None, name: str | None = None) -> Agent:
        """Return a new path of an agent's tree: it shares the agent's first responses, and all that was given before them.

        A shared response is trained once, with the mean advantage of the paths that share it.

        Args:
            responses: number of shared responses; None: all so far.
            name: name of the new path; None: the tree's name and the path's number, like "policy/2".

        Raises:
            TrajectoryRejected: the tree has too many paths, the name is taken, or the agent has fewer responses.
        """
        tree = [one for one in self.agents.values() if one.number == agent.number]
        if len(tree) >= self.bounds.paths:
            raise self.failed(TOO_LONG, f"more than environment.max_paths = {self.bounds.paths} paths of {tree[0].name}")
        name = f"{tree[0].name}/{len(tree) + 1}" if name is None else name
        if name in self.agents:
            raise self.failed(ERROR, f"fork: there is an agent {name} already")
        shared = len(agent.responses) if responses is None else responses
        self.agents[name] = agent.forked(name, len(tree), shared)
        return self.agents[name]

    @property
    def spoke(self) -> list[Agent]:
        """The agents that responded, in the order they were first requested; of a forked agent, the leaves of its tree. Read it only after
        the environment has ended.

        Raises:
            TrajectoryRejected: an agent failed, even if the environment caught the failure, or an agent is still responding.
        """
        agents = list(self.agents.values())
        for agent in agents:
            if agent.speaking:
                self.failed(ERROR, f"agent {agent.name}: the environment ended while a response was in progress")
        self.check()
        return [agents[i] for i in turn_tree.leaves([agent.turns for agent in agents])]

    def check(self) -> None:
        """Raise the first failure of the episode or an agent, even if the environment caught it."""
        if self.failure is not None:
            raise self.failure

    def failed(self, reason: str, detail: str) -> AsyncmoeError:
        """Reject the episode, unless it has failed already; return its first failure."""
        self.failure = self.failure or TrajectoryRejected(reason, detail)
        return self.failure

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Reject the episode for an error within the block, even if the environment catches it."""
        try:
            yield
        except AsyncmoeError as error:
            self.failure = self.failure or error
            raise
