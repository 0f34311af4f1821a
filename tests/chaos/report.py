"""Figures of a results file. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from tests.chaos.world import ENGINE_PARTS

Record = Mapping[str, Any]


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Return counts, recoveries in seconds, tokens lost and violations, of each tier."""
    found = {tier: _of_tier([one for one in records if one["tier"] == tier]) for tier in sorted({one["tier"] for one in records})}
    for tier, counted in found.items():
        if tier == "real":
            del counted["unfinished_tokens_cut"]  # a real engine does not tell what it had sampled of a response
    return found


def _of_tier(records: Sequence[Record]) -> dict[str, Any]:
    met = [one for one in records if one["kind"] != "end" and one["target"] != "nothing"]
    ends = [one for one in records if one["kind"] == "end"]
    kinds = sorted({one["kind"] for one in met})
    return {
        "faults": len(met),
        "by_kind": dict(Counter(one["kind"] for one in met).most_common()),
        "by_target": dict(Counter(_part(one["target"]) for one in met).most_common()),
        "by_moment": dict(Counter(one["moment"] for one in met).most_common()),
        "recovery_s": {"all": _seconds(met), **{kind: _seconds(one for one in met if one["kind"] == kind) for kind in kinds}},
        "lost_s": {
            part: {kind: _seconds(one for one in met if (_part(one["target"]), one["kind"]) == (part, kind)) for kind in ("kill", "hang")}
            for part in sorted({_part(one["target"]) for one in met if one["kind"] in ("kill", "hang")})
        },
        "finished_groups_lost": sum("was finished" in text for one in records for text in one["violations"]),
        "unfinished_tokens_cut": {
            "most_of_one_response": max((one["most_cut"] for one in met), default=0),
            "median_of_a_fault": median(one["cut_tokens"] for one in met) if met else 0,
            "responses_started_over": sum(one.get("started_over", 0) for one in met),
        },
        "take_overs": {
            "runs": sum(one.get("engines_taken_over", 0) > 0 for one in met),
            "engines": sum(one.get("engines_taken_over", 0) for one in met),
        },
        "runs_ended": len(ends),
        "steps": sum(one["steps"] for one in ends),
        "violations": [
            {"block": one["block"], "fault": one.get("fault", "end"), "what": one["violations"]} for one in records if one["violations"]
        ],
    }


def _seconds(records: Iterable[Record]) -> dict[str, float]:
    every = sorted(one["seconds"] for one in records)
    return {"median": median(every), "worst": every[-1]} if every else {}


def _part(target: str) -> str:
    role, _, number = target.partition(".")
    return role if number.isdigit() and role in ("engine", *ENGINE_PARTS) else target.partition("/")[0]
