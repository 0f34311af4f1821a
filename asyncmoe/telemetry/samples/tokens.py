"""Align the two halves of a sampled trajectory by token, for the terminal, and as JSON for other programs and the page of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from asyncmoe.telemetry.measured import mean
from asyncmoe.telemetry.samples.choice import kept
from asyncmoe.telemetry.samples.index import GroupSample
from asyncmoe.telemetry.samples.records import Role, SampledGroup, SampledMember, Stretch, Trained, Value

_COLUMNS = ("id", "piece", "role", "version", "engine", "trainer", "ratio", "advantage", "weight", "teacher", "state", "mismatch")
_LIMIT = 20.0
"""Log-ratios are clamped to this, as in the objective."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """A token with the values of engine and trainer; None: not sampled, not known, or not finite.

    Attributes:
        place: its index in the trajectory.
        version: weight version that sampled it.
        engine, trainer: its log-probability there.
        advantage, weight: its advantage, and its importance weight in the correction.
        state: see `records.Trained.states`; "" if the trainer's half is missing.
        mismatch: number of layers in which the trainer's router would have chosen other experts.
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
    """Tokens that were left out of the sample. `role`: role of the first of these tokens."""

    place: int
    count: int
    role: Role


def tokens_of(group: SampledGroup, member: SampledMember, trained: Trained | None) -> list[TokenView | Gap]:
    """Return the tokens of a member in order; `Gap`s stand for those that were left out."""
    roles = [role for role, count in member.roles for _ in range(count)]
    sampled = iter(_sampled(member, trained, roles.count("response")))
    found: list[TokenView | Gap] = []
    place = 0
    for part in (*_parts(group.prompt if member.shared else Stretch()), *_parts(member.rest)):
        count = part if isinstance(part, int) else 1
        fields = [next(sampled) for role in roles[place : place + count] if role == "response"]
        if isinstance(part, int):
            found.append(Gap(place, count, roles[place]))
        else:
            found.append(TokenView(place, *part, roles[place], *(fields[0] if fields else ())))
        place += count
    return found


def _parts(stretch: Stretch) -> list[tuple[int, str] | int]:
    """Return id and text of each kept token; the number of omitted tokens stands in their place."""
    tokens = list(zip(stretch.tokens, stretch.pieces, strict=True))
    return [*tokens[: stretch.after], *([stretch.left_out] if stretch.left_out else []), *tokens[stretch.after :]]


def split(tokens: Sequence[TokenView | Gap]) -> tuple[list[TokenView | Gap], list[TokenView | Gap]]:
    """Return the tokens before the first response, and the tokens from there on."""
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
    """Return the fields of each sampled token from `TokenView.version` on; `size`: number of sampled tokens."""
    versions = [version for version, count in member.versions for _ in range(count)]
    columns: list[Sequence[Any]] = [versions, _spread(member.logprobs, size), _spread(member.teacher, size)]
    if trained is not None:
        columns += [_spread(values, size) for values in (trained.logprobs, trained.advantages, trained.weights)]
        columns += [_spread(trained.states, size, ""), _spread(trained.mismatch, size)]
    return [*zip(*columns, strict=True)]


def _spread(values: float | Sequence[Any], size: int, absent: Any = None) -> list[Any]:
    """Return a value for each of `size` sampled tokens, of which the middle may have been left out; a single number applies to all."""
    if isinstance(values, int | float):
        return [float(values)] * size
    head, tail = kept(size, len(values))
    return [*values[:head], *[absent] * (size - head - tail), *values[len(values) - tail :]]


def as_json(sample: GroupSample, most: int = 0) -> str:
    """Return a group as one line of JSON, with a list for each property of its tokens; `gaps` describes omitted tokens.

    Args:
        most: maximum tokens of a prompt and of the rest; if there are more, the middle is left out. 0: all.
    """
    entry, group = sample.entry, sample.group
    values = {
        **{name: getattr(entry, name) for name in ("group", "attempt", "outcome", "reason", "step", "reward")},
        **{name: getattr(group, name) for name in ("detail", "version", "time", "question", "answer")},
        "members": [_member(sample, member, most) for member in group.members],
    }
    return json.dumps(values).replace("\x7f", "\\u007f")  # the one ASCII control character that JSON does not escape


def advantage(trained: Trained | None) -> float | None:
    """Return the mean advantage of a response's tokens; None without the trainer's half."""
    if trained is None:
        return None
    return trained.advantages if isinstance(trained.advantages, int | float) else mean(trained.advantages)


def _member(sample: GroupSample, member: SampledMember, most: int) -> Mapping[str, Any]:
    trained = sample.trained.get(member.key)
    prompt, said = split(tokens_of(sample.group, member, trained))
    every = [*shortened(prompt, most), *shortened(said, most)]
    tokens = [token for token in every if isinstance(token, TokenView)]
    named = [name for name in member.__struct_fields__ if name not in ("shared", "rest", "logprobs", "teacher", "digest", "calls")]
    return {
        **{name: getattr(member, name) for name in named},
        "calls": [msgspec.structs.asdict(call) for call in member.calls],
        "advantage": advantage(trained),
        "layers": None if trained is None else trained.layers,
        "tokens": {name: [getattr(token, name) for token in tokens] for name in _COLUMNS},
        "gaps": [asdict(one) for one in every if isinstance(one, Gap)],
    }
