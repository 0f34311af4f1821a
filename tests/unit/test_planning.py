"""`asyncmoe plan`: an update's figures against a complete plan, the command, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_models_plan import SMALL

from asyncmoe.errors import ConfigError, UserError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.models.payload import Payload
from asyncmoe.plan import memory
from asyncmoe.plan.memory import EngineMemory
from asyncmoe.plan.plan_command import parse_adapter
from asyncmoe.plan.traffic import foresee
from asyncmoe.reshard import PADDING, plan
from benchmarks.published import REAL
from tests.unit.command_line import run_command

REPOSITORY = Path(__file__).parents[2]
MODELS = REPOSITORY / "examples" / "cluster" / "models"
CLUSTER = REPOSITORY / "examples" / "cluster" / "qwen3-30b-a3b.yaml"
QWEN3 = REAL["Qwen3-30B-A3B"]


def command(*arguments: object) -> str:
    found = run_command(["plan", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "160"})
    assert found.exit_code == 0, found.output
    return found.output


def test_figures_are_those_of_the_plan() -> None:
    hf = {**SMALL, "mlp_only_layers": []}
    trainer, engine = MegatronParallel(2, 2, 2, 1, 2, te=True), EngineParallel(2, 2)
    found = foresee(hf, trainer, engine, 3, nic=0.5)
    payload = Payload(hf)
    engines = payload.engines(engine, "bfloat16", 3, first=8)
    direct = plan(payload.tensors(), payload.trainer(trainer, "bfloat16"), engines)
    assert found.wire == direct.wire_bytes == sum(2 * piece.box.size for one in engines for piece in one.pieces if piece.tensor != PADDING)
    assert found.sent == max(direct.egress.values())
    assert found.received == max(sum(t.nbytes for t in direct.transfers if t.destination == rank) for rank in range(8, 14))
    assert found.seconds == pytest.approx(max(found.sent, found.received) / 0.5e9)


def test_an_engine_rank_receives_from_its_own_device_without_a_link() -> None:
    """Against a complete plan: rank r of the trainer and rank 8 + r of the engines are on device r."""
    hf = {**REAL["Qwen3-30B-A3B"], "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 512}
    trainer, engine = MegatronParallel(4, 1, 8, 1, 2), EngineParallel(4, 4)
    found, payload = foresee(hf, trainer, engine, 2, nic=0.5, first=0), Payload(hf)
    moved_ = plan(payload.tensors(), payload.trainer(trainer, "bfloat16"), payload.engines(engine, "bfloat16", 2, first=8)).transfers
    own = {one.destination: one.nbytes for one in moved_ if one.destination == one.source + 8}
    into = {rank: sum(one.nbytes for one in moved_ if one.destination == rank) for rank in range(8, 16)}
    out = [sum(one.nbytes for one in moved_ if one.source == rank and one.destination != rank + 8) for rank in range(8)]
    assert own
    assert (found.within, found.received, found.wire, found.sent) == (max(own.values()), max(into.values()), sum(out), max(out))
    assert found.seconds == max(*out, *(into[rank] - own.get(rank, 0) for rank in into)) / 0.5e9


@pytest.mark.parametrize("model", ["DeepSeek-V3", "GLM-4.5-Air", "Mixtral-8x22B"])
def test_families_can_be_planned(model: str) -> None:
    """As their configurations are, layers of multi-token prediction included: what is moved are the others."""
    engine = EngineParallel(8, 8)
    found = foresee(REAL[model], MegatronParallel(tp=4, ep=8, dp=8), engine, 1)
    held = memory.engine(REAL[model], engine, EngineMemory(0)).parts["weights"]
    assert found.model_bytes < 8 * held < 1.1 * found.model_bytes


ODD = ["", "32", "rank=x", "rank=4,alpha=3", "rank=4,targets=lm_head", "rank=4,experts=all", "rank=0", "rank=2,rank=4"]


@pytest.mark.parametrize("text", ODD)
def test_an_adapter_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--lora: |^lora\.(rank|targets\.0|experts): got "):
        parse_adapter(text, family_of(QWEN3).shape_of(QWEN3))


# ---------------------------------------------------------------- the command


def test_a_run_that_does_not_fit_is_told_what_to_change(tmp_path: Path) -> None:
    model = ("--model", MODELS / "Qwen3-30B-A3B.json")
    fits = command("--config", CLUSTER, *model, "--json", tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["fits"]
    assert written["update"]["seconds"] == pytest.approx(max(written["update"]["sent"], written["update"]["received"]) / 50e9)
    assert "does not fit" not in fits
    for keys, way in (
        (["trainer.recompute=none", "trainer.tp=2"], "take trainer.recompute=full, or "),
        (["engines.tp=1", "engines.ep=1"], "take fewer tokens (engines.max_total_tokens, environment.max_tokens), or a larger engines.tp"),
    ):
        found = command("--config", CLUSTER, *model, *keys, "--json", tmp_path / "plan.json")
        assert "does not fit" in found
        assert f"expected at most 76 GB, as 5% of its 80 GB are left free; {way}" in found
        assert not json.loads((tmp_path / "plan.json").read_text())["fits"]


@pytest.mark.parametrize(
    ("keys", "steps", "checkpoints"),
    [
        ([], 40, 2),
        (["trainer.keep_checkpoints=3", "trainer.keep_every=50"], 60, 4),
        (["log.keep=50"], 100, 4),
        (["log.keep=all"], 100, 3),
        (["log.keep=all", "warmup.steps=0"], 100, 2),
        (["log.keep=30", "trainer.checkpoint_every=0"], 60, 2),
    ],
)
def test_the_disk_of_a_run_follows_from_what_it_keeps(tmp_path: Path, keys: list[str], steps: int, checkpoints: int) -> None:
    shape = ("run.steps=100", "warmup.steps=20", "trainer.checkpoint_every=20", "environment.max_tokens=64")
    command("--config", "examples/demo.yaml", *shape, *keys, "--json", tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())["disk"]
    assert (found["steps"], found["checkpoints"]) == (steps, checkpoints)


def test_the_command_says_what_a_yaml_is_to_say() -> None:
    lines = command("--config", "examples/demo.yaml").strip().splitlines()
    line = next(line for line in lines if line.startswith("# memory: trainer "))
    assert line in (REPOSITORY / "examples" / "demo.yaml").read_text()


def test_the_command_splits_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    out = command("--model", MODELS / "Qwen3-30B-A3B.json", "--nodes", 2, "--json", file)
    assert "cluster: {trainer_nodes: 1, engine_nodes: 1, network: hostname}" in out
    assert " of bfloat16 " in out
    (written,) = json.loads(file.read_text())["splits"]
    assert written["trainer"]["memory"]["parts"]["gradients"] == 2 * written["trainer"]["memory"]["parts"]["weights"]
    assert written["update"]["received"] <= written["update"]["wire"]


def test_a_step_in_turn_is_the_sum_and_divided_the_longer_part(tmp_path: Path) -> None:
    command("--model", MODELS / "Qwen3-30B-A3B.json", "--nodes", 1, "--json", tmp_path / "plan.json")
    one, other = json.loads((tmp_path / "plan.json").read_text())["splits"]
    sampled = 384 * 8 * 4096
    for found in (one, other):
        assert found["step_s"]["generation"] == pytest.approx(sampled / found["sampled"])
        assert found["step_s"]["training"] == pytest.approx(sampled / found["trained"])
    kept = sum(one["trainer"]["memory"]["parts"][part] for part in ("weights", "optimizer"))
    arrive = max(one["update"]["within"] / (0.9 * 3.35e12 / 2), one["update"]["seconds"])
    assert one["step_s"]["switch"] == pytest.approx(2 * kept / (0.9 * 64e9) + arrive)
    assert one["step_s"]["in all"] == pytest.approx(sum(one["step_s"][part] for part in ("generation", "training", "switch")))
    assert other["step_s"]["in all"] == max(other["step_s"]["generation"], other["step_s"]["training"])
    command(
        "--model", MODELS / "Qwen3-30B-A3B.json", "--nodes", 1, "--gpus-per-node", 1, "--lora", "rank=16,experts=shared_outer"
    )  # one way


def test_float8_is_said_and_a_model_that_a_run_refuses_too() -> None:
    out = command("--model", MODELS / "DeepSeek-V3.json", "--nodes", 10)
    assert "of float8 and bfloat16" in out
    assert "num_nextn_predict_layers" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", 2, "--config", CLUSTER], "got both"),
        (["--nodes", 2], "got no --model"),
        (["--nodes", 2, "--model", MODELS, "run.steps=1"], "got run.steps=1"),
        (["--config", CLUSTER, "--model", MODELS / "Qwen3-30B-A3B.json", "trainer.tp=3"], "trainer.ranks: got 8"),
    ],
)
def test_a_mistake_is_named(arguments: list[Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        command(*arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
