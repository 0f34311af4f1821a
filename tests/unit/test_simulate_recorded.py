"""Lengths from the records of a run: files by the run's own writers, and missing parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncmoe.errors import DataError
from asyncmoe.simulate.workload import parse, recorded
from asyncmoe.telemetry.samples.records import Begin, SampledGroup, SampledMember, ToolCall
from tests.unit.sampled_run import SampledRun


def agent(key: str, gaps: tuple[int, ...], seconds: float) -> SampledMember:
    """A prompt of 7 tokens, turns of 10, 20, ..., and observations between them."""
    roles: list[tuple[Any, int]] = [("prompt", 7), ("response", 10)]
    for number, observed in enumerate(gaps, 2):
        roles += [("observation", observed), ("response", 10 * number)]
    call = ToolCall(name="t", argument="", observation="", seconds=seconds)
    return SampledMember(key=key, episode=0, roles=roles, digest=1, calls=[call] * len(gaps))


def test_lengths_of_a_run_are_those_of_its_groups(tmp_path: Path) -> None:
    """A text of n characters is n tokens and an end here; each draw is one of the groups, and each member comes once."""
    run = SampledRun(tmp_path / "run")
    with pytest.raises(DataError) as refused:
        recorded(tmp_path / "run")
    assert refused.value.got == "no kept groups"
    run.group(0, ["1", "222"])
    run.group(1, ["55555", "666666"])
    drawn = parse(str(tmp_path / "run")).groups(2, seed=0)
    seen = {tuple(sorted(turns[0] for turns, _ in next(drawn))) for _ in range(100)}
    assert seen == {(2, 4), (6, 7)}
    wider = next(parse(str(tmp_path / "run")).groups(8, seed=0))
    assert len(wider) == 8


def test_turns_and_tools_of_agents(tmp_path: Path) -> None:
    members = [agent("a", (), 0.0), agent("b", (5, 8), 2.0), agent("c", (11,), 3.0)]
    broken = msgspec.structs.replace(members[0], key="d", digest=None)
    group = SampledGroup(time=0.0, group=0, fate="queued", version=0, question="", answer="", members=[*members, broken])
    (tmp_path / "samples").mkdir()
    lines = (msgspec.json.encode(record) + b"\n" for record in (Begin(time=0.0, step=0), group))
    (tmp_path / "samples" / "rollout.jsonl").write_bytes(b"".join(lines))
    assert recorded(tmp_path) == [[((10,), ()), ((10, 20, 30), (2.0, 2.0)), ((10, 20), (3.0,))]]
