"""Aligns the two halves of a sampled trajectory by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from asyncmoe.telemetry.samples.choice import kept
from asyncmoe.telemetry.samples.records import Role, SampledGroup, SampledMember, Stretch, Trained, Value

_LIMIT = 20.0
"""Log-ratios are clamped to this, as in the objective."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """A token as both sides saw it; None: not sampled, not known, or not finite.

    Attributes:
        place: its index in the trajectory.
        version: weight version that sampled it.
        engine, trainer: its log-probability.
        ratio: exp(trainer - engine).
        advantage, weight: its advantage, and its importance weight in the correction.
        state: see `records.Trained.states`; "" if the trainer's half is missing.
        mismatch: number of layers whose router would have sent it elsewhere.
    """

    place: int
    id: int
    piece: str
    role: Role
    version: int | None = None
    engine: Value = None
    trainer: Value = None
    ratio: Value = None
    advantage: Value = None
    weight: Value = None
    teacher: Value = None
    state: str = ""
    mismatch: int | None = None


@dataclass(frozen=True)
class Gap:
    """Tokens that were left out of the sample. `role`: that of the first."""

    place: int
    count: int
    role: Role


def tokens_of(group: SampledGroup, member: SampledMember, trained: Trained | None) -> list[TokenView | Gap]:
    """Return the tokens of a member in order; `Gap`s stand for those that were left out."""
    shared = group.prompt if member.shared else Stretch()
    roles = list(chain.from_iterable(repeat(role, count) for role, count in member.roles))
    found: list[TokenView | Gap] = []
    ordinal = 0
    versions = list(chain.from_iterable(repeat(version, count) for version, count in member.versions))
    engine, teacher = _Kept(member.logprobs, len(versions)), _Kept(member.teacher, len(versions))
    sides = None if trained is None else _Trained(trained)
    place = 0
    for stretch in (shared, member.rest):
        kept_tokens = [*zip(stretch.tokens, stretch.pieces, strict=True)]
        gap = [stretch.left_out] if stretch.left_out else []
        parts: Sequence[tuple[int, str] | int] = (*kept_tokens[: stretch.after], *gap, *kept_tokens[stretch.after :])
        for part in parts:
            role = roles[place]
            if isinstance(part, int):
                found.append(Gap(place, part, role))
                ordinal += roles[place : place + part].count("response")
                place += part
                continue
            token = TokenView(place, part[0], part[1], role)
            if role == "response":
                version = versions[ordinal] if ordinal < len(versions) else None
                token = _sampled(token, version, engine.at(ordinal), teacher.at(ordinal), sides, ordinal)
                ordinal += 1
            found.append(token)
            place += 1
    return found


def split(tokens: Sequence[TokenView | Gap]) -> tuple[list[TokenView | Gap], list[TokenView | Gap]]:
    """Return the tokens before the first response, and the others."""
    first = next((i for i, one in enumerate(tokens) if one.role != "prompt"), len(tokens))
    return list(tokens[:first]), list(tokens[first:])


def shortened(tokens: list[TokenView | Gap], most: int) -> list[TokenView | Gap]:
    """Return at most `most` of the tokens, from both ends, with a gap for the middle. 0: all."""
    if not most or len(tokens) <= most:
        return tokens
    head, tail = kept(len(tokens), most)
    cut = tokens[head : len(tokens) - tail]
    count = sum(one.count if isinstance(one, Gap) else 1 for one in cut)
    return [*tokens[:head], Gap(cut[0].place, count, cut[0].role), *tokens[len(tokens) - tail :]]


class _Kept:
    """Values of S sampled tokens of which the middle may be left out."""

    def __init__(self, values: Sequence[Value], size: int) -> None:
        self._values, self._size = values, size
        self._head = kept(size, len(values))[0] if values else 0

    def at(self, ordinal: int) -> Value:
        """Return the value of a sampled token; None if it was left out."""
        place = ordinal if ordinal < self._head else ordinal - self._size + len(self._values)
        return self._values[place] if self._values and (ordinal < self._head or place >= self._head) else None


class _Trained:
    def __init__(self, record: Trained) -> None:
        self._size = record.sampled
        self.logprobs = self._of(record.logprobs)
        self.advantages, self.weights = self._of(record.advantages), self._of(record.weights)
        self.states = self._of(list(range(len(record.states))))
        self.letters = record.states
        self.mismatch = self._of(list(record.mismatch))

    def _of(self, values: float | Sequence[Value]) -> _Kept:
        return _Kept([float(values)] * self._size if isinstance(values, int | float) else values, self._size)


def _sampled(token: TokenView, version: int | None, engine: Value, teacher: Value, sides: _Trained | None, ordinal: int) -> TokenView:
    if sides is None:
        return TokenView(token.place, token.id, token.piece, token.role, version, engine, teacher=teacher)
    trainer, state, mismatch = sides.logprobs.at(ordinal), sides.states.at(ordinal), sides.mismatch.at(ordinal)
    ratio = None if trainer is None or engine is None else round(math.exp(max(-_LIMIT, min(_LIMIT, trainer - engine))), 6)
    return TokenView(
        token.place,
        token.id,
        token.piece,
        token.role,
        version,
        engine,
        trainer,
        ratio,
        sides.advantages.at(ordinal),
        sides.weights.at(ordinal),
        teacher,
        "" if state is None else sides.letters[int(state)],
        None if mismatch is None else int(mismatch),
    )
