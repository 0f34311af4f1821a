"""What an episode leaves for readers of samples: its text without routes and masks, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from asyncmoe.engines.types import VersionSpan
from asyncmoe.errors import ProtocolError, TrajectoryRejected
from asyncmoe.rollout.episodes.environment import Agent, Episode
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId
from asyncmoe.telemetry.samples import records
from asyncmoe.telemetry.samples.choice import Choice
from asyncmoe.telemetry.samples.records import ToolCall
from asyncmoe.trajectory import Trajectory

SHOWN = 2000
"""Characters kept of a failure."""


@dataclass(frozen=True)
class SampledTurn:
    """A turn without its routes and masks, which are large."""

    given: tuple[int, ...]
    tokens: np.ndarray
    logprobs: np.ndarray
    spans: tuple[VersionSpan, ...]


@dataclass(frozen=True)
class SampledPart:
    """One path of an agent in an episode. `at`: (agent, branch); `given`: tokens since its last response."""

    name: str
    at: tuple[int, int]
    turns: tuple[SampledTurn, ...]
    given: tuple[int, ...]
    finish: str
    calls: tuple[ToolCall, ...]
    why: str

    def own(self, forked: int) -> tuple[SampledTurn, ...]:
        """Return the turns after the first `forked` tokens."""
        ends = accumulate(len(turn.given) + len(turn.tokens) for turn in self.turns)
        return tuple(turn for turn, end in zip(self.turns, ends, strict=True) if end > forked)

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for turn in self.turns for token in (*turn.given, *turn.tokens.tolist())] + list(self.given)


@dataclass(frozen=True)
class SampledEpisode:
    """What an episode left: a trajectory of each path that spoke, by (agent, branch), or why there is none."""

    parts: tuple[SampledPart, ...]
    results: dict[tuple[int, int], SampledResult]
    failure: str


@dataclass(frozen=True)
class SampledResult:
    """The parts of a trajectory that its turns do not have."""

    reward: float
    rewards: np.ndarray | None
    teacher: np.ndarray | None
    seconds: dict[str, float]
    digest: int
    parent: int
    forked: int


class EpisodeNotes:
    """Notes the episodes of the groups that are kept, from their beginnings to their ends.

    Args:
        choice: the groups to keep.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._episodes: dict[EpisodeId, Episode] = {}

    def opened(self, episode: Episode) -> None:
        """Note that an episode begins."""
        if self._choice.takes(episode.place.group):
            self._episodes[episode.place] = episode

    def ended(self, place: EpisodeId, outcome: Sequence[Trajectory] | TrajectoryRejected | None) -> SampledEpisode | None:
        """Return what an episode leaves, which ended so (None: it was cancelled); None: it is not one to keep."""
        if (made := self._episodes.pop(place, None)) is None:
            return None
        if outcome is None:
            return SampledEpisode(_parts(made), {}, "cancelled")
        if isinstance(outcome, TrajectoryRejected):
            return SampledEpisode(_parts(made), {}, str(outcome)[:SHOWN])
        results = {(t.agent, t.branch): _result(t) for t in outcome}
        # A path that is the beginning of another is part of that one.
        return SampledEpisode(tuple(part for part in _parts(made) if part.at in results or not part.turns), results, "")


def cleaned(text: str) -> str:
    """Return text that can be written: a lone surrogate, which a user's program may give, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def to_bytes(sampled: SampledEpisode) -> bytes:
    """Return the bytes that `from_bytes` reads."""
    return _ENCODER.encode(sampled)


def from_bytes(sent: bytes) -> SampledEpisode:
    """Read what another process noted. Raises ProtocolError."""
    try:
        return _DECODER.decode(sent)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a sampled episode: {error}") from error


def _parts(episode: Episode) -> tuple[SampledPart, ...]:
    return tuple(_part(agent) for agent in list(episode.agents.values()))


def _part(agent: Agent) -> SampledPart:
    turns = tuple(SampledTurn(turn.given, turn.generation.tokens, turn.generation.logprobs, turn.generation.spans) for turn in agent.turns)
    finish = agent.turns[-1].generation.finish if agent.turns else ""
    name, why = (cleaned(str(text)[:SHOWN]) for text in (agent.name, agent.why))  # a user's code may set both
    return SampledPart(name, (agent.number, agent.branch), turns, agent.unanswered, finish, tuple(agent.calls), why)


def _result(t: Trajectory) -> SampledResult:
    return SampledResult(t.reward, t.rewards, t.teacher, t.seconds, records.digest_of(t.tokens, t.logprobs), t.parent, t.forked)


def _sent(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    raise NotImplementedError(type(value).__name__)


def _received(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        dtype, data = value
        if dtype not in ("<i4", "<f4"):
            raise ValueError(f"got an array of {dtype}, expected int32 or float32")
        return np.frombuffer(data, dtype)
    raise NotImplementedError(kind.__name__)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_sent)
_DECODER = msgspec.msgpack.Decoder(SampledEpisode, dec_hook=_received)
