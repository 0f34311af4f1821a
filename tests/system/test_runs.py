"""Whole runs: the real engine, the real trainer, one command."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest

from asyncmoe import checkpoints
from asyncmoe.telemetry import heartbeats
from asyncmoe.telemetry.samples.index import index
from asyncmoe.telemetry.samples.records import CLIPPED
from asyncmoe.telemetry.samples.tokens import TokenView, tokens_of
from tests.system.runs import ENGINES, ONE_RANK, Command, demo, metrics, refused, run, silent_engines, start, summary_of, wait_for
from tests.unit.report_pages import data_of, figures_of
from tests.unit.test_checkpoints import flip

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 warm-up and 6 reinforcement-learning steps, checked against the engine's checksums at every update, evaluated at every
    second; every group is kept as a sample."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    evaluated = ("evaluation.every=2", "evaluation.prompts=16", "evaluation.temperature=0")
    watched = ("sync.verify_every=1",)
    run(directory, "run.steps=6", "telemetry.samples.groups=4", *watched, *evaluated)
    return directory


def test_a_run_trains_and_says_what_it_did(finished: Path) -> None:
    summary = summary_of(finished)
    steps = metrics(finished)
    assert [s["step"] for s in steps] == list(range(1, 11))
    assert [s["phase"] for s in steps] == ["warmup"] * 4 + ["rl"] * 6
    assert steps[3]["loss"] < steps[0]["loss"]
    assert summary["steps"] == 6
    assert summary["max_staleness_seen"] <= 1
    assert summary["pause_ms_median"] > 0
    assert summary["max_abs_logprob_diff_same_version"] <= 1e-4


def test_versions_are_evaluated_while_training_goes_on(finished: Path) -> None:
    summary, steps = summary_of(finished), metrics(finished)
    first, last = summary["evaluation_first"][""], summary["evaluation_last"][""]
    assert (first["version"], first["version_min"]) == (4, 4)
    assert (last["version"], last["version_min"]) == (10, 10), "the run ends when its last version has been evaluated"
    for found in (first, last):
        assert (found["questions"], found["episodes"], found["failed"]) == (16, 16, {})
        assert 0 <= found["reward_mean"] <= 1
        assert found["version"] <= found["version_min"] <= found["version_max"] <= 10
    assert any(first["time"] < step["time"] < last["time"] for step in steps if step["phase"] == "rl")
    assert "Evaluation" in figures_of(finished / "report.html")["Learning"]


def test_a_healthy_run_breaks_no_rule_and_every_process_ends_its_heartbeats(finished: Path) -> None:
    assert not any(step["anomalies"] or step["skipped_updates"] for step in metrics(finished))
    assert not any("anomaly" in (finished / "logs" / f"{name}.log").read_text() for name in ("controller", "trainer"))
    beats = heartbeats.read(finished)
    assert {role: beat.does for role, beat in beats.items()} == dict.fromkeys(
        ("controller", "engine.0", "rollout.1", "trainer.0", "trainer.1"), heartbeats.ENDED
    )


def test_the_engine_generates_while_the_trainer_trains(finished: Path) -> None:
    assert summary_of(finished)["overlap_share"] > 0
    (page,) = data_of(finished / "report.html")
    assert [title.split(";")[0] for title in figures_of(finished / "report.html")["Timeline"]] == ["Last 6 steps"]
    assert {"python", "torch", "megatron-core", "sglang"} <= set(page["versions"])


def test_samples_of_all_groups_have_the_figures_of_the_metrics(finished: Path) -> None:
    found = index(finished)
    assert {entry.step for entry in found if entry.step is not None} == set(range(5, 11))
    for step in metrics(finished)[4:]:
        samples = [entry.load() for entry in found if entry.step == step["step"]]
        assert len(samples) == 4
        members = [(sample, member) for sample in samples for member in sample.group.members]
        assert [len(sample.trained) for sample in samples] == [4] * 4
        assert fmean(member.reward for _, member in members) == pytest.approx(step["reward_mean"])
        every = [one for sample, member in members for one in tokens_of(sample.group, member, sample.trained[member.key])]
        said = [one for one in every if isinstance(one, TokenView) and one.role == "response"]
        assert len(said) == sum(step["ages"].values())
        drift = [one.trainer - one.engine for one in said]
        assert fmean(map(abs, drift)) == pytest.approx(step["logprob_diff_mean"], abs=2e-5)
        assert fmean(one.ratio for one in said) == pytest.approx(step["ratio_mean"], abs=2e-5)
        assert fmean(one.weight for one in said) == pytest.approx(step["correction_mean"], abs=2e-5)
        assert sum(one.state == CLIPPED for one in said) / len(said) == pytest.approx(step["clip_fraction"])
        ages = Counter(str(step["step"] - 1 - one.version) for one in said)
        assert ages == step["ages"]
        assert all(one.mismatch is not None and 0 <= one.mismatch <= 2 for one in said)


def test_a_checkpoint_exports_to_hugging_face(finished: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "hf"
    copy = shutil.copytree(finished, tmp_path / "copy", ignore=shutil.ignore_patterns("*.log"))
    away = finished.rename(finished.with_name("away"))  # the copy's configuration still names it
    try:
        Command("export", str(copy), str(out)).succeed()
    finally:
        away.rename(finished)
    start_model = finished.parent / "model"
    exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
    original = AutoModelForCausalLM.from_pretrained(start_model).state_dict()
    assert exported.keys() == original.keys()
    assert all(not tensor.equal(original[name]) for name, tensor in exported.items() if tensor.dim() > 1)
    assert load_file(out / "model.safetensors")["model.norm.weight"].isfinite().all()
    assert AutoTokenizer.from_pretrained(out).encode("1+2=") == AutoTokenizer.from_pretrained(start_model).encode("1+2=")
    assert "existing path" in refused("export", str(finished), str(out))
    assert "without quantization_config" in refused("export", str(finished), str(tmp_path / "out"), "--float8")


def test_weights_are_staged_while_the_trainer_trains(finished: Path) -> None:
    summary, steps = summary_of(finished), metrics(finished)[5:]
    assert 0 < summary["pause_ms_median"] < 1e3 * summary["sync_seconds_median"]
    assert all(0 <= step["sync_wait_seconds"] < step["step_seconds"] for step in steps)
    assert any(step["sync_wait_seconds"] < step["sync_seconds"] for step in steps)


def test_a_killed_run_goes_on_exactly_where_its_newest_intact_checkpoint_is(tmp_path: Path) -> None:
    """The warm-up is deterministic, so what it does again must have the losses it had before it was killed. The newest checkpoint is
    damaged, the run was moved meanwhile, and the command names its directory alone."""
    killed, moved, copies = tmp_path / "killed", tmp_path / "moved", tmp_path / "copies"
    shape = ("warmup.steps=40", "run.steps=1", "trainer.checkpoint_every=10", "engines.orphan_s=3")
    first = start(killed, *shape, silent_engines(tmp_path))
    assert wait_for(lambda: any(s["step"] >= 22 for s in metrics(killed)), 120), first.process.poll()
    first.process.send_signal(signal.SIGKILL)
    assert first.gone(30), first.alive()
    assert checkpoints.newest(killed) == checkpoints.directory(killed, 20)
    before = [s for s in metrics(killed) if s["step"] > 10]
    assert before[-1]["step"] < 30
    killed.rename(moved)
    flip(checkpoints.directory(moved, 20) / "__1_0.distcp")
    _, error = Command("run", str(moved), f"trainer.checkpoint_copy=file://{copies}", f"engines.python={ENGINES}").succeed()
    assert "checkpoint step-00000020 is damaged: __1_0.distcp has other content (CRC-32C " in error
    assert "; the run resumes from step-00000010" in error
    assert not killed.exists()
    assert summary_of(moved)["steps"] == 1
    again = [s for s in metrics(moved) if s["step"] > 10][len(before) :]
    assert [s["step"] for s in again] == list(range(11, 42))
    for old, new in zip(before, again, strict=False):
        assert new["loss"] == pytest.approx(old["loss"], abs=1e-6)
    assert again[-1]["version"] == 41
    status, out, error = Command("checkpoints", str(moved), "--verify", "--json").finish()
    assert status == 1, error
    states = {one["name"]: one["state"] for one in map(json.loads, out.splitlines())}
    assert states == {"step-00000020.damaged": "damaged", "step-00000040": "verified", "step-00000041": "verified"}
    saved = checkpoints.directory(moved, 41)
    kept = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert {path.name: path.read_bytes() for path in (copies / "moved" / saved.name).iterdir()} == kept


@pytest.mark.thorough
def test_a_measured_run_is_told_and_leaves_nothing_else(tmp_path: Path) -> None:
    file, settings = tmp_path / "speeds.json", demo(tmp_path / "run", *ONE_RANK, "trainer.checkpoint_every=1")[1:]
    out, _ = Command("bench", "step", *settings, "--minutes", "0.1", "--json", str(file)).succeed()
    found = json.loads(file.read_text())
    assert found["trainer"]["gpus"] == found["engines"]["gpus"] == 1
    assert found["measured"]["seconds"] >= 6
    assert 0 < found["trainer"]["step_s"] * found["measured"]["steps"] < found["measured"]["seconds"]
    assert found["engines"]["tokens_per_s"] > 0
    assert str(file) in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "speeds.json"]
