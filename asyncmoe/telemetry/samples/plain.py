"""Samples as text for other programs: lines of fields, or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from asyncmoe.telemetry.samples.choice import kept
from asyncmoe.telemetry.samples.index import GroupSample
from asyncmoe.telemetry.samples.records import REJECTED, TRAINED, SampledGroup, SampledMember, Trained
from asyncmoe.telemetry.samples.tokens import Gap, TokenView, shortened, tokens_of
from asyncmoe.telemetry.samples.visible import escaped

_COLUMNS = ("id", "piece", "role", "version", "engine", "trainer", "ratio", "advantage", "weight", "teacher", "state", "mismatch")
_CHARACTERS = 4
"""Characters of a question that count as a token: it is kept as text."""


def lines(sample: GroupSample, most: int = 0) -> Iterator[str]:
    """Yield a line for the group, one for each response, and one for each tool call.

    A line is a kind and fields `name=value`, separated by tabs. Values are JSON: texts are quoted, and no line has a tab or a control
    character of the model's in it.

    Args:
        most: tokens shown of the question and of a response; of more, the middle is left out. 0: all.
    """
    entry, group = sample.entry, sample.group
    yield _line(
        "group",
        group=group.group,
        attempt=group.attempt,
        outcome=entry.outcome,
        reason=entry.reason or None,
        detail=group.detail or None,
        step=entry.step,
        version=group.version,
        reward=_short(entry.reward),
        question=_ends(group.question, most * _CHARACTERS),
        answer=group.answer,
    )
    for member in group.members:
        trained = sample.trained.get(member.key)
        tokens = tokens_of(group, member, trained)
        yield _line(
            "response",
            key=member.key,
            agent=member.name,
            parent=_parent(group, member),
            forked=member.forked or None,
            reward=_short(member.reward),
            advantage=_short(advantage(trained)),
            finish=member.finish or None,
            why=member.why or None,
            failure=member.failure or None,
            tokens=sum(count for role, count in member.roles if role == "response"),
            versions=sorted({version for version, _ in member.versions}),
            trained=None if trained is None else trained_share(trained),
            text=text_of(shortened([one for one in tokens if one.role != "prompt"], most)),
        )
        for call in member.calls:
            yield _line("call", key=member.key, **msgspec.to_builtins(call))


def as_json(sample: GroupSample) -> str:
    """Return a group as one line of JSON, with a list for each property of its tokens; what was left out is named in `gaps`."""
    entry, group = sample.entry, sample.group
    members = [_member(sample, member) for member in group.members]
    values = {
        "group": group.group,
        "attempt": group.attempt,
        "outcome": entry.outcome,
        "reason": entry.reason,
        "detail": group.detail,
        "step": entry.step,
        "version": group.version,
        "time": group.time,
        "reward": entry.reward,
        "question": group.question,
        "answer": group.answer,
        "members": members,
    }
    return escaped(json.dumps(values, ensure_ascii=False))


def advantage(trained: Trained | None) -> float | None:
    """Return the mean advantage of a response's tokens; None without the trainer's half."""
    if trained is None:
        return None
    if isinstance(trained.advantages, int | float):
        return trained.advantages
    known = [value for value in trained.advantages if value is not None]
    return sum(known) / len(known) if known else None


def trained_share(trained: Trained) -> float:
    """Return the share of a response's kept tokens that were trained on, clipped or not."""
    return round(sum(state not in REJECTED for state in trained.states) / max(len(trained.states), 1), 4)


def state_words(state: str) -> str:
    """Return a state of a token in words."""
    known = {TRAINED: "trained", "c": "clipped", "w": "weight capped", "": "not known"}
    return known.get(state) or f"rejected by {REJECTED.get(state, state)}"


def text_of(tokens: list[TokenView | Gap]) -> str:
    """Return the text after the prompt, with a mark for what was left out."""
    return "".join(f"[{one.count} tokens left out]" if isinstance(one, Gap) else one.piece for one in tokens if one.role != "prompt")


def _member(sample: GroupSample, member: SampledMember) -> Mapping[str, Any]:
    trained = sample.trained.get(member.key)
    every = tokens_of(sample.group, member, trained)
    tokens = [token for token in every if isinstance(token, TokenView)]
    named = [name for name in member.__struct_fields__ if name not in ("shared", "rest", "logprobs", "teacher", "digest", "calls")]
    return {
        **{name: getattr(member, name) for name in named},
        "calls": [{name: getattr(call, name) for name in call.__struct_fields__} for call in member.calls],
        "advantage": advantage(trained),
        "layers": None if trained is None else trained.layers,
        "tokens": {name: [getattr(token, name) for token in tokens] for name in _COLUMNS},
        "gaps": [asdict(one) for one in every if isinstance(one, Gap)],
    }


def _line(kind: str, **fields: object) -> str:
    return "\t".join([kind, *(f"{name}={_json(value)}" for name, value in fields.items() if value is not None)])


def _parent(group: SampledGroup, member: SampledMember) -> str | None:
    """Return the key of the path that a path was forked from; None if it was not."""
    if not member.forked:
        return None
    place = (member.episode, member.attempt, member.agent, member.parent)
    return next((one.key for one in group.members if (one.episode, one.attempt, one.agent, one.branch) == place), None)


def _ends(text: str, most: int) -> str:
    """Return at most `most` characters of a text, from both ends, with a mark for the middle. 0: all."""
    if not most or len(text) <= most:
        return text
    head, tail = kept(len(text), most)
    return f"{text[:head]}[{len(text) - most} characters left out]{text[len(text) - tail :]}"


def _json(value: object) -> str:
    return escaped(json.dumps(value, ensure_ascii=False))


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
