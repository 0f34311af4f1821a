"""The flight recorder on whole runs: lost processes, replays, forks, packs."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.flight.records import TRAINED
from asyncmoe.telemetry import processes
from tests import families
from tests.system.runs import Command, json_lines, logs, metrics, refused, start, wait_for
from tests.system.trained_once import WARM, process, trained

pytestmark = pytest.mark.system
SHAPE = ("trainer.checkpoint_every=4", "log.keep=all", "log.piece_tokens=8")


def weights(directory: Path, out: Path) -> str:
    """Export the newest checkpoint of a run; return the SHA-256 of its weights."""
    Command("export", str(directory), str(out)).succeed()
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))).hexdigest()


def forked(directory: Path, at: int, out: Path, *overrides: str) -> Path:
    Command("fork", str(directory), "--at", str(at), f"run.dir={out}", *overrides).succeed(600.0)
    return out


def lose(directory: Path, role: str) -> None:
    """Kill a process, once it runs again if it was lost before, and wait for the next step."""
    assert wait_for(lambda: any(one.role == role and processes.runs(one) for one in processes.read(directory)), 60), f"{role} is gone"
    lines, last = len(metrics(directory)), metrics(directory)[-1]["step"]
    process(directory, role).kill()
    assert wait_for(partial(trained, directory, lines, last + 1), 150), logs(directory)


def forged(directory: Path, step: dict[str, Any], resume: Callable[[], Command]) -> str:
    """Return what a run that is resumed says if the first digest of the weights after a step was another one; restore the record."""
    file, true = directory / TRAINED, str(step["weights"])
    text, other = file.read_text(), ("B" if true[0] == "A" else "A") + true[1:]
    assert true in text
    file.write_text(text.replace(true, other))
    status, _, error = resume().finish()
    assert status != 0
    file.write_text(file.read_text().replace(other, true))
    return error


def test_a_run_that_lost_processes_is_trained_again_bit_for_bit(tmp_path: Path) -> None:
    """By a replay, by a fork without other keys, and by the replay of a pack that was moved and whose run is gone."""
    directory, steps = tmp_path / "run", 24
    command = start(directory, *SHAPE, f"run.steps={steps}")
    assert wait_for(partial(trained, directory, 0, WARM + 2), 150), logs(directory)
    for role in ("trainer.1", "controller", "engine.0"):
        lose(directory, role)
    command.process.kill()
    assert command.gone(), command.alive()
    step = json_lines(directory / TRAINED)[-1]
    assert "weights after the step differ in embedding" in forged(directory, step, lambda: start(directory, *SHAPE, f"run.steps={steps}"))
    start(directory, *SHAPE, f"run.steps={steps}").succeed(directory=directory)
    assert {one["lineage"] for one in metrics(directory)} == {0}, "no weights were lost"
    losses: dict[int, set[float]] = {}
    for one in metrics(directory):
        losses.setdefault(one["step"], set()).add(one["loss"])
    assert len(metrics(directory)) > len(losses), "steps were trained again"
    assert all(len(found) == 1 for found in losses.values())

    out, _ = Command("replay", str(directory), "--tokens").succeed(600.0)
    assert f"steps {WARM + 1} to {WARM + steps}: bit-equal" in out
    same = forked(directory, WARM + 5, tmp_path / "same")
    assert weights(same, tmp_path / "of-fork") == weights(directory, tmp_path / "of-run")
    other = forked(directory, WARM + steps - 4, tmp_path / "other", "trainer.optimizer.lr=1e-4")
    assert [one["step"] for one in metrics(other)] == list(range(WARM + steps - 3, WARM + steps + 1))

    status, out, _ = Command("replay", str(directory), "--against", str(other)).finish()
    assert (status, out.startswith(f"step {WARM + steps - 3}: the learning rate")) == (1, True), out
    assert "  trainer.optimizer.lr: " in out
    short = forked(directory, WARM + 5, tmp_path / "short", "run.steps=7")
    assert metrics(short)[-1]["step"] == WARM + 7
    Command("pack", str(directory), str(tmp_path / "packed"), "--steps", f"{WARM + 10}:{WARM + 12}").succeed()
    shutil.rmtree(directory)
    (tmp_path / "model").unlink()
    (tmp_path / "packed").rename(tmp_path / "moved")
    out, _ = Command("replay", str(tmp_path / "moved"), "--step", str(WARM + 11)).succeed()
    assert f"step {WARM + 11}: bit-equal" in out
    assert f"a record and a batch: {WARM + 1} to {WARM + 12}" in refused("replay", str(tmp_path / "moved"), "--step", "1000")


@pytest.mark.thorough
def test_two_hundred_steps_with_forty_faults(tmp_path: Path) -> None:
    directory, steps, draw = tmp_path / "run", 200, random.Random(54)
    shape = (*SHAPE, f"run.steps={steps}", "trainer.max_restarts=9", "run.controller_restarts=9", "engines.restarts=99")
    command = start(directory, *shape)
    assert wait_for(partial(trained, directory, 0, WARM + 1), 150), logs(directory)
    for _ in range(40):
        lose(directory, draw.choice(("trainer.0", "trainer.1", "controller", "engine.0")))
    assert metrics(directory)[-1]["step"] < WARM + steps, "all faults came before the end"
    command.succeed(1200.0, directory)
    out, _ = Command("replay", str(directory)).succeed(1200.0)
    assert f"steps {WARM + 1} to {WARM + steps}: bit-equal" in out
    assert {one["lineage"] for one in metrics(directory)} == {0}
    same = forked(directory, WARM, tmp_path / "same")
    assert weights(same, tmp_path / "of-fork") == weights(directory, tmp_path / "of-run")
    assert len(json_lines(directory / TRAINED)) > steps


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "layout", "train", "dtype"),
    [
        ("llama", "tp", "full", "float32"),
        ("qwen3", "pp", "lora", "bfloat16"),
        ("llama", "cp", "full", "bfloat16"),
        ("qwen3_moe", "ep", "lora", "float32"),
        ("mixtral", "tp", "full", "bfloat16"),
        ("qwen3_moe", "cp", "full", "float32"),
        ("deepseek", "pp", "full", "float32"),
        ("deepseek", "ep", "lora", "bfloat16"),
    ],
)
def test_every_kind_of_model_layout_and_dtype(
    family: str, layout: str, train: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two threads a rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    families.write(tmp_path / "model", family)
    directory, layouts = tmp_path / "run", [f"trainer.{key}={size}" for key, size in {"ep": 1, layout: 2}.items()]
    layouts += ["trainer.first_stage_layers=2"] if layout == "pp" else []  # of three
    shape = (f"train={train}", f"trainer.dtype={dtype}", f"engines.dtype={dtype}", *layouts)
    start(directory, *SHAPE, "run.steps=40", "warmup.steps=2", *shape).succeed(600.0, directory)
    out, _ = Command("replay", str(directory)).succeed(600.0)
    assert "steps 3 to 42: bit-equal" in out
    assert json_lines(directory / TRAINED)[0]["circumstances"]["threads"] == "2"
