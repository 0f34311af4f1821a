"""Aligns the two halves of a sampled trajectory by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    teacher: Value = None
    trainer: Value = None
    advantage: Value = None
    weight: Value = None
    state: str = ""
    mismatch: int | None = None

    @property
    def ratio(self) -> Value:
        """exp(trainer - engine)."""
        if self.trainer is None or self.engine is None:
            return None
        return round(math.exp(max(-_LIMIT, min(_LIMIT, self.trainer - self.engine))), 6)


@dataclass(frozen=True)
class Gap:
    """Tokens that were left out of the sample. `role`: that of the first."""

    place: int
    count: int
    role: Role


def tokens_of(group: SampledGroup, member: SampledMember, trained: Trained | None) -> list[TokenView | Gap]:
    """Return the tokens of a member in order; `Gap`s stand for those that were left out."""
    shared = group.prompt if member.shared else Stretch()
    roles = [role for role, count in member.roles for _ in range(count)]
    sampled = _sampled(member, trained, roles.count("response"))
    found: list[TokenView | Gap] = []
    place = ordinal = 0
    for stretch in (shared, member.rest):
        tokens = [*zip(stretch.tokens, stretch.pieces, strict=True)]
        gap = [stretch.left_out] if stretch.left_out else []
        parts: Sequence[tuple[int, str] | int] = (*tokens[: stretch.after], *gap, *tokens[stretch.after :])
        for part in parts:
            role = roles[place]
            if isinstance(part, int):
                found.append(Gap(place, part, role))
                ordinal += roles[place : place + part].count("response")
                place += part
                continue
            fields = sampled[ordinal] if role == "response" else ()
            found.append(TokenView(place, part[0], part[1], role, *fields))
            ordinal += role == "response"
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


def _sampled(member: SampledMember, trained: Trained | None, size: int) -> list[tuple[Any, ...]]:
    """Return the fields of each sampled token from `TokenView.version` on; `size`: their number."""
    versions = [version for version, count in member.versions for _ in range(count)]
    columns: list[Sequence[Any]] = [versions, _spread(member.logprobs, size), _spread(member.teacher, size)]
    if trained is not None:
        columns += [_spread(values, size) for values in (trained.logprobs, trained.advantages, trained.weights)]
        columns += [_spread(trained.states, size, ""), _spread(trained.mismatch, size)]
    return [*zip(*columns, strict=True)]


def _spread(values: float | Sequence[Any], size: int, absent: Any = None) -> list[Any]:
    """Return a value for each of `size` sampled tokens, of which the middle may have been left out; one number is that of all."""
    if isinstance(values, int | float):
        return [float(values)] * size
    head, tail = kept(size, len(values))
    return [*values[:head], *[absent] * (size - head - tail), *values[len(values) - tail :]]
