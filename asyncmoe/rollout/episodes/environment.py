"""What a policy meets in an episode, and what it speaks through.

An environment is a small class of yours. It gives an agent tokens or text, and asks it for responses:

    class Guess:
        async def run(self, episode: Episode) -> float:
            agent = episode.agent()
            agent.see(episode.prompt.tokens)
            response = await agent.respond()
            return float(response.text.strip() == episode.prompt.answer)

Token in, token out: what an agent was given and what it sampled is kept as tokens and is never decoded and encoded again, so what is
trained is what was sampled. Given tokens are not trained on. An environment runs in the controller's event loop, beside all other
episodes: it must not block it (`asyncio.to_thread` is for what would). While it waits for something else than a response, a tool or
another agent, the engines have nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol, runtime_checkable

from asyncmoe.errors import TrajectoryRejected
from asyncmoe.rollout.engines.engine_client import Sampling
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tokenizer import Tokenizer

ERROR, TIMEOUT, TOO_LONG = "environment_error", "environment_timeout", "episode_too_long"

Rewards = float | Mapping[str, float] | None
"""Of all agents, by an agent's name, or None: the configured scorer scores every agent."""


class Environment(Protocol):
    """One object for the whole run; many episodes run in it at the same time. A method `async def close(self)` is called at its end."""

    async def run(self, episode: Episode) -> Rewards:
        """One episode, from its prompt to its end. What it raises, other than what an agent raised, rejects the episode."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can also show how it is done: what a warm-up needs."""

    def demonstrate(self, agent: Agent, episode: Episode) -> str:
        """What a teacher says next in this conversation. Draws come from `episode.random`."""
        ...


@dataclass(frozen=True)
class Response:
    """What an agent said. `finish`: "stop", or "length" where `max_new_tokens` ended it."""

    text: str
    tokens: tuple[int, ...]
    finish: str


@dataclass(frozen=True)
class Bounds:
    """Of an episode: responses and tokens of one agent, and how many agents."""

    turns: int = 8
    tokens: int = 1 << 20
    agents: int = 8


Speak = Callable[["Agent", tuple[int, ...], Sampling], Awaitable[list[Turn]]]
"""(agent, tokens given since it spoke last, sampling) -> the turns of one response."""


class Agent:
    """One conversation of the policy; becomes one trajectory.

    Attributes:
        name: what the environment calls it.
        number: its place among the agents of the episode; responses of equal numbers are compared within a group.
        turns: what it was given and said so far, as the engines answered.
        credits: (index of a sampled token, reward) of steps the environment rewarded.
    """

    def __init__(self, name: str, number: int, tokenizer: Tokenizer, sampling: Sampling, bounds: Bounds, speak: Speak) -> None:
        self.name, self.number = name, number
        self.turns: list[Turn] = []
        self.responses: list[Response] = []
        self.credits: dict[int, float] = {}
        self._tokenizer, self._sampling, self._bounds, self._speak = tokenizer, sampling, bounds, speak
        self._given: list[int] = []
        self._speaking = False
        self.failure: TrajectoryRejected | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole conversation, given and sampled."""
        return (*(token for turn in self.turns for token in (*turn.given, *turn.generation.tokens)), *self._given)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each of `tokens`, whether the policy sampled it."""
        made = (flag for turn in self.turns for flag in (*(False,) * len(turn.given), *(True,) * len(turn.generation.tokens)))
        return (*made, *(False,) * len(self._given))

    @property
    def text(self) -> str:
        """The whole conversation, decoded; special tokens leave none."""
        return self._tokenizer.decode(self.tokens)

    def see(self, what: str | Sequence[int]) -> None:
        """Give it text or tokens; they are not trained on."""
        if self._speaking:
            raise self._failed(ERROR, "was given something to see while it makes a response")
        self._given += self._tokenizer.encode(what) if isinstance(what, str) else what

    def credit(self, reward: float) -> None:
        """Reward the step it made last: its last response (`objective.process`)."""
        if not self.turns or self._given:
            raise self._failed(ERROR, "credit: got no response to reward, expected to be called right after one")
        self.credits[len(self.tokens) - 1] = float(reward)

    async def respond(self, *, max_new_tokens: int | None = None, stop: Sequence[int] | None = None) -> Response:
        """What it says to all it has seen.

        Args:
            max_new_tokens: at most `rollout.max_new_tokens`, which is the default.
            stop: token ids that end the response instead of the end of the sequence.

        Raises:
            TrajectoryRejected: the episode cannot go on: it is too long, an engine failed, a token is outside the vocabulary. An
                environment need not catch it; the episode ends with this reason in any case.
        """
        sampling = self._sampled_as(max_new_tokens, stop)
        given, self._speaking = tuple(self._given), True
        try:
            made = await self._speak(self, given, sampling)
        except TrajectoryRejected as rejected:
            self.failure = self.failure or rejected
            raise
        finally:
            self._speaking = False
        self.turns += made
        self._given = []
        tokens = tuple(token for turn in made for token in turn.generation.tokens)
        self.responses.append(Response(self._tokenizer.decode(tokens), tokens, made[-1].generation.finish))
        return self.responses[-1]

    def rest(self) -> None:
        """The episode is over. One that has left a response under way fails."""
        if self._speaking:
            self._failed(ERROR, "the environment ended while it was making a response")

    def _sampled_as(self, max_new_tokens: int | None, stop: Sequence[int] | None) -> Sampling:
        if self._speaking:
            raise self._failed(ERROR, "asked for a response while it makes one")
        if not self._given and not self.turns:
            raise self._failed(ERROR, "asked for a response before it has seen anything")
        outside = [t for t in self._given if not 0 <= t < self._tokenizer.vocabulary]
        if outside:
            raise self._failed("token_out_of_vocabulary", f"token {outside[0]} of vocabulary {self._tokenizer.vocabulary} was given")
        if len(self.responses) >= self._bounds.turns:
            raise self._failed(TOO_LONG, f"more than environment.max_turns = {self._bounds.turns} responses")
        room = self._bounds.tokens - len(self.tokens)
        if room <= 0:
            raise self._failed(TOO_LONG, f"{len(self.tokens)} tokens leave no room for a response within {self._bounds.tokens}")
        wanted = self._sampling.max_new_tokens if max_new_tokens is None else min(max_new_tokens, self._sampling.max_new_tokens)
        if wanted <= 0:
            raise self._failed(ERROR, f"respond: got max_new_tokens {wanted}, expected at least 1")
        return replace(self._sampling, max_new_tokens=min(wanted, room), stop=self._sampling.stop if stop is None else tuple(stop))

    def _failed(self, reason: str, detail: str) -> TrajectoryRejected:
        self.failure = self.failure or TrajectoryRejected(reason, f"agent {self.name}: {detail}")
        return self.failure


@dataclass(eq=False)
class Episode:
    """What an environment has of one episode.

    Attributes:
        place: its group, its number within it, and how often it was started before.
        random: for its own draws; the same for the same run seed and place.
        agents: those that were asked for, by name.
    """

    prompt: Prompt
    place: EpisodeId
    tokenizer: Tokenizer
    random: Random
    sampling: Sampling
    bounds: Bounds
    speak: Speak
    agents: dict[str, Agent] = field(default_factory=dict)
    failure: TrajectoryRejected | None = None

    def agent(self, name: str = "policy") -> Agent:
        """The agent of this name; made when first asked for."""
        if name not in self.agents:
            if len(self.agents) >= self.bounds.agents:
                self.failure = TrajectoryRejected(TOO_LONG, f"more than environment.max_agents = {self.bounds.agents} conversations")
                raise self.failure
            self.agents[name] = Agent(name, len(self.agents), self.tokenizer, self.sampling, self.bounds, self.speak)
        return self.agents[name]

    @property
    def spoke(self) -> list[Agent]:
        """The agents that said something, in the order they were asked for; to be read when the environment has ended.

        Raises:
            TrajectoryRejected: what any agent failed with, whatever the environment made of it; or one is still speaking.
        """
        for agent in self.agents.values():
            agent.rest()
        failures = [self.failure, *(agent.failure for agent in self.agents.values())]
        if failed := [failure for failure in failures if failure is not None]:
            raise failed[0]
        return [agent for agent in self.agents.values() if agent.turns]
