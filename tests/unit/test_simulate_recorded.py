"""A simulation from the records of a run: files that the run's own writers wrote, and what is missing or wrong in them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from asyncmoe.cli import app
from asyncmoe.errors import DataError, UserError
from asyncmoe.simulate.recorded import read_recorded
from asyncmoe.simulate.workload import parse
from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.samples.records import Begin, SampledGroup, SampledMember, ToolCall
from asyncmoe.telemetry.schema import METRICS, Step
from tests.unit.command_line import run_command
from tests.unit.sampled_run import SampledRun


def steps(run_dir: Path, **values: Any) -> None:
    """Three steps, of which the middle one has the values; and one of the warm-up, which counts nowhere."""
    metrics = JsonLines(run_dir / METRICS)
    metrics.write(Step(step=0, phase="warmup", time=0.0, version=0, train_seconds=99.0))
    for number, factor in ((1, 0.5), (2, 1.0), (3, 2.0)):
        scaled = {key: value * factor if isinstance(value, float) else value for key, value in values.items()}
        metrics.write(Step(step=number, phase="rl", time=float(number), version=number, **scaled))
    metrics.close()


@pytest.fixture
def run(tmp_path: Path) -> SampledRun:
    return SampledRun(tmp_path / "run")


def groups(run_dir: Path, *records: Begin | SampledGroup) -> None:
    (run_dir / "samples" / "rollout.jsonl").write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def agent(key: str, gaps: tuple[int, ...], seconds: float) -> SampledMember:
    """A prompt of 7 tokens, turns of 10, 20, ..., and observations between them."""
    roles: list[tuple[Any, int]] = [("prompt", 7), ("response", 10)]
    for number, observed in enumerate(gaps, 2):
        roles += [("observation", observed), ("response", 10 * number)]
    call = ToolCall(name="t", argument="", observation="", seconds=seconds)
    return SampledMember(key=key, episode=0, roles=roles, digest=1, calls=[call] * len(gaps), seconds={"score": 0.5})


def test_lengths_of_a_run_are_those_of_its_groups(run: SampledRun) -> None:
    """A text of n characters is n tokens and an end here; each draw is one of the groups, and each member comes once."""
    run.group(0, ["1", "222"])
    run.group(1, ["55555", "666666"])
    found = read_recorded(run.config.run.dir)
    assert sorted(sorted(turns for turns, _ in group) for group in found.groups) == [[(2,), (4,)], [(6,), (7,)]]
    drawn = parse(str(run.config.run.dir)).groups(2, seed=0)
    seen = {tuple(sorted(turns[0] for turns, _ in next(drawn))) for _ in range(100)}
    assert seen == {(2, 4), (6, 7)}
    wider = next(parse(str(run.config.run.dir)).groups(8, seed=0))
    assert len(wider) == 8


def test_turns_and_tools_of_agents(run: SampledRun) -> None:
    members = [agent("a", (), 0.0), agent("b", (5, 8), 2.0), agent("c", (11,), 3.0)]
    broken = msgspec.structs.replace(members[0], key="d", digest=None)
    group = SampledGroup(time=0.0, group=0, fate="queued", version=0, question="", answer="", members=[*members, broken])
    groups(run.config.run.dir, Begin(time=0.0, step=0), group)
    found = read_recorded(run.config.run.dir)
    assert found.groups == ((((10,), ()), ((10, 20, 30), (2.0, 2.0)), ((10, 20), (3.0,))),)
    assert (found.keys["scoring.seconds"], found.keys["scoring.sigma"]) == (0.5, 0.0)


def test_seconds_are_medians_of_the_steps(run: SampledRun) -> None:
    run.group(0, ["1", "22"])
    steps(run.config.run.dir, train_seconds=8.0, sync_seconds=3.0, pause_ms=500.0)
    keys = read_recorded(run.config.run.dir).keys
    assert (keys["trainer.step_s"], keys["sync.seconds"], keys["sync.pause_s"]) == (8.0, 2.5, 0.5)
    assert (keys["groups_per_step"], keys["group_size"]) == (4, 2)


def test_the_command_simulates_a_run_from_its_records(run: SampledRun, tmp_path: Path) -> None:
    run.group(0, ["1", "22"])
    steps(run.config.run.dir, train_seconds=8.0)
    arguments = ["simulate", "--trace", str(run.config.run.dir), "steps=6", "--json", str(tmp_path / "found.json")]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    figures = json.loads((tmp_path / "found.json").read_text())
    assert figures["plant"]["trainer"]["step_s"] == 8.0
    assert figures["pools"]["t_train"] == pytest.approx(8.0)


def test_a_directory_that_is_no_run_and_a_run_without_anything(run: SampledRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the directory of a run"):
        read_recorded(tmp_path)
    with pytest.raises(DataError, match="got a run without kept groups"):
        read_recorded(run.config.run.dir)


def cautions_of(arguments: list[str], tmp_path: Path) -> list[str]:
    """What the command says and writes as cautions; both are the same."""
    found = run_command(["simulate", *arguments, "steps=6", "--json", str(tmp_path / "found.json")], catch_exceptions=False)
    assert found.exit_code == 0
    written: list[str] = json.loads((tmp_path / "found.json").read_text())["cautions"]
    printed = " ".join(found.output.split())
    assert all(f"caution: {sentence}" in printed for sentence in written)
    return written


@pytest.mark.parametrize("how", [[], ["--sweep"]])
def test_figures_that_the_run_does_not_have_are_named(run: SampledRun, tmp_path: Path, how: list[str]) -> None:
    """Its lengths are of use before its first step; training and sync are then the plant's, of which nothing was said."""
    run.group(0, ["1", "22"])
    run_dir, plant = run.config.run.dir, tmp_path / "plant.yaml"
    plant.write_text("trainer: {step_s: 60, gpus: 8}\nsync: {pause_s: 0.5}\nscoring: {seconds: 1}\n")
    arguments = [str(plant), "--trace", str(run_dir), *how]
    (run_dir / METRICS).touch()
    first, *_ = cautions_of([*arguments, "sync.seconds=4"], tmp_path)
    assert first == (
        f"of the plant, not of the run: trainer.step_s=60, sync.pause_s=0.5, which {run_dir} does not tell; measure, and give each as "
        "KEY=VALUE"
    )
    steps(run_dir, train_seconds=8.0, sync_seconds=3.0, pause_ms=500.0)
    assert [caution for caution in cautions_of(arguments, tmp_path) if "of the plant" in caution] == []


def test_scoring_times_have_the_spread_of_the_records(run: SampledRun) -> None:
    members = [msgspec.structs.replace(agent(str(n), (), 0.0), seconds={"score": seconds}) for n, seconds in enumerate((0.1, 1.0, 10.0))]
    group = SampledGroup(time=0.0, group=0, fate="queued", version=0, question="", answer="", members=members)
    groups(run.config.run.dir, group)
    keys = read_recorded(run.config.run.dir).keys
    assert keys["scoring.seconds"] == 1.0
    assert keys["scoring.sigma"] == pytest.approx(math.log(10) * math.sqrt(2 / 3))
