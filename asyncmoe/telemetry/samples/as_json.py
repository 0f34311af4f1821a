"""Samples as JSON, for other programs and for the page of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from asyncmoe.telemetry.samples.index import GroupSample
from asyncmoe.telemetry.samples.records import SampledMember, Trained
from asyncmoe.telemetry.samples.tokens import Gap, TokenView, shortened, split, tokens_of

_COLUMNS = ("id", "piece", "role", "version", "engine", "trainer", "ratio", "advantage", "weight", "teacher", "state", "mismatch")


def as_json(sample: GroupSample, most: int = 0) -> str:
    """Return a group as one line of JSON, with a list for each property of its tokens; what was left out is named in `gaps`.

    Args:
        most: tokens of a prompt and of what follows it; of more, the middle is left out. 0: all.
    """
    entry, group = sample.entry, sample.group
    values = {
        **{name: getattr(entry, name) for name in ("group", "attempt", "outcome", "reason", "step", "reward")},
        **{name: getattr(group, name) for name in ("detail", "version", "time", "question", "answer")},
        "members": [_member(sample, member, most) for member in group.members],
    }
    return json.dumps(values).replace("\x7f", "\\u007f")  # of ASCII, the one control character that JSON leaves as it is


def advantage(trained: Trained | None) -> float | None:
    """Return the mean advantage of a response's tokens; None without the trainer's half."""
    if trained is None:
        return None
    if isinstance(trained.advantages, int | float):
        return trained.advantages
    known = [value for value in trained.advantages if value is not None]
    return sum(known) / len(known) if known else None


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
