"""`asyncmoe plan`: its figures against a plan made in full, its arguments, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_models_plan import SMALL

from asyncmoe.errors import ConfigError, DataError, UserError
from asyncmoe.models import EngineParallel, MegatronParallel, family_of, load_hf_config
from asyncmoe.plan import memory
from asyncmoe.plan.memory import EngineMemory
from asyncmoe.plan.render_plan import show, write
from asyncmoe.plan.sizes import engines_text, parse_adapter, parse_engines, parse_trainer, trainer_text
from asyncmoe.plan.traffic import Forecast, Speeds, foresee
from asyncmoe.reshard import PADDING, plan
from benchmarks.published import REAL


def config(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "model.json"
    file.write_text(json.dumps({**SMALL, "mlp_only_layers": [], **changes}))
    return file


def of(model: Path, trainer: str, engines: str, **changes: Any) -> Forecast:
    hf, (count, engine) = load_hf_config(model), parse_engines(engines)
    adapter = parse_adapter(lora, family_of(hf).shape_of(hf)) if (lora := changes.pop("lora", None)) is not None else None
    given = {"bucket_bytes": 1 << 10, "speeds": Speeds(2.0, 0.5), "adapter": adapter, **changes}
    return foresee(str(model), hf, parse_trainer(trainer), engine, count, **given)


def test_figures_are_those_of_the_plan(tmp_path: Path) -> None:
    file = config(tmp_path)
    hf = json.loads(file.read_text())
    found = of(file, "tp=2,pp=2,ep=2,dp=2,te", "3xtp2ep2")
    family, trainer, engine = family_of(hf), MegatronParallel(2, 2, 2, 1, 2, te=True), EngineParallel(2, 2)
    tensors, source = family.tensors(hf), family.megatron_layouts(hf, trainer, "bfloat16")
    engines = family.sglang_layouts(hf, engine, "bfloat16", 3, first=8)
    direct = plan(tensors, source, engines)
    unique = sum(2 * piece.box.size for layout in engines for piece in layout.pieces if piece.tensor != PADDING)
    assert found.lower_bound == unique
    assert (found.trainer_ranks, found.engine_ranks, found.engines) == (8, 6, 3)
    way = found.way
    egress = [direct.egress.get(rank, 0) for rank in range(8)]
    ingress = [sum(t.nbytes for t in direct.transfers if t.destination == rank) for rank in range(8, 14)]
    assert (way.bytes_wire, way.ratio) == (direct.wire_bytes, 1.0)
    assert (way.sent.least, way.sent.mean, way.sent.most) == (min(egress), sum(egress) / 8, max(egress))
    assert (way.received.least, way.received.mean, way.received.most) == (min(ingress), sum(ingress) / 6, max(ingress))
    assert way.imbalance == max(egress) / (sum(egress) / 8)
    assert way.buckets == -(-max(egress + ingress) // 1024)
    pairs = [(t.source, t.destination) for t in direct.transfers if t.nbytes]
    assert way.messages == max(sum(rank in pair for pair in pairs) for rank in range(14))
    assert way.nic_seconds == pytest.approx(max(egress + ingress) / 0.5e9)
    assert way.nvlink_seconds == pytest.approx(way.nic_seconds / 4)
    assert 0 < way.plan_seconds < 20


@pytest.mark.parametrize(
    "model",
    ["DeepSeek-V3", "GLM-4.5-Air", "Mixtral-8x22B", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("Kimi-K2", "GLM-4.5"))],
)
def test_families_can_be_planned(tmp_path: Path, model: str) -> None:
    """As their configurations are, layers of multi-token prediction included: what is moved are the others."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(REAL[model]))
    found = of(file, "tp=4,ep=8,dp=8", "1xtp8ep8", bucket_bytes=256 << 20)
    assert found.way.ratio == 1.0
    held = memory.engine(REAL[model], found.engine, EngineMemory(0)).parts["weights"]
    assert found.model_bytes < 8 * held < 1.1 * found.model_bytes


def test_what_a_rank_wants_twice_is_needed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of a tied model with an output layer of its own has the embedding twice: more on the wire, and the ratio says so."""
    monkeypatch.setattr("asyncmoe.models.family.Family.check", lambda *_: None)
    found = of(config(tmp_path, tie_word_embeddings=True), "dp=2", "1xtp1")
    embedding = 2 * SMALL["vocab_size"] * SMALL["hidden_size"]
    assert found.way.bytes_wire == found.lower_bound + embedding
    assert found.way.ratio > 1


DENSE = {key: value for key, value in SMALL.items() if not re.search("experts|mlp|moe", key)} | {"model_type": "qwen3"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("trainer", "engines", "ranks"),
    [
        ("tp=2,pp=2,vpp=2", "2xtp2", (4, 4)),
        ("pp=3,first=1,last=2", "1xtp2dp2pp2", (3, 4)),
        ("pp=2,first=3", "2xtp1pp3", (2, 6)),
    ],
)
def test_dense_models_chunks_and_uneven_stages(tmp_path: Path, trainer: str, engines: str, ranks: tuple[int, int], tied: bool) -> None:
    file = tmp_path / "model.json"
    hf = {**DENSE, "tie_word_embeddings": tied, "num_hidden_layers": 4}
    file.write_text(json.dumps(hf))
    found = of(file, trainer, engines)
    assert (found.trainer_ranks, found.engine_ranks) == ranks
    layouts = family_of(hf).sglang_layouts(hf, found.engine, "bfloat16", found.engines)
    wanted = sum(2 * piece.box.size for layout in layouts for piece in layout.pieces if piece.tensor != PADDING)
    assert found.way.bytes_wire == wanted == found.lower_bound
    assert found.way.imbalance >= 1.0


def test_json_and_table(tmp_path: Path) -> None:
    found = of(config(tmp_path), "tp=2,dp=2", "2xtp2")
    write(asdict(found), tmp_path / "plan.json")
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["trainer"] == {
        "tp": 2, "pp": 1, "ep": 1, "etp": 1, "dp": 2, "te": False, "vpp": 1, "first_layers": None, "last_layers": None,
    }  # fmt: skip
    assert written["engine"] == {
        "tp": 2, "ep": 1, "pp": 1, "dp": 1, "dp_lm_head": False, "redundant": 0, "dense_tp1": False, "a2a": False, "fused_shared": False,
    }  # fmt: skip
    assert written["way"]["sent"]["most"] == found.way.sent.most
    console = Console(record=True, width=120)
    show(found, console, 1)
    text = console.export_text()
    for words in ("trainer 4 ranks (tp 2, pp 1, ep 1, etp 1, dp 2)", "2 engines, 4 ranks (tp 2, ep 1 each)", "1.000"):
        assert words in text
    with pytest.raises(DataError, match="No such file"):
        write(asdict(found), tmp_path / "none" / "plan.json")


def test_sizes_that_are_not_the_default_are_shown(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    show(of(config(tmp_path, num_hidden_layers=6), "pp=2,vpp=2,first=2", "1xtp2dp2pp2"), console, 1)
    text = console.export_text()
    for words in ("(tp 1, pp 2, ep 1, etp 1, dp 1, vpp 2, first 2)", "4 ranks (tp 2, ep 1, dp 2, pp 2 each)"):
        assert words in text


def test_arguments() -> None:
    assert parse_trainer("pp=2,vpp=4,first=8") == MegatronParallel(pp=2, vpp=4, first_layers=8)
    assert parse_trainer("pp=2,last=8") == MegatronParallel(pp=2, last_layers=8)
    assert parse_engines("2xtp8ep4dp2pp3") == (2, EngineParallel(8, 4, 3, 2))
    assert parse_engines("2xtp8pp3") == (2, EngineParallel(8, pp=3))
    assert parse_trainer("tp=2, pp=3,ep=4,etp=2,dp=8,te") == MegatronParallel(2, 3, 4, 2, 8, te=True)
    assert parse_trainer("dp=2") == MegatronParallel(dp=2)
    assert parse_engines("16xtp8ep4") == (16, EngineParallel(8, 4))
    assert parse_engines("1xtp2") == (1, EngineParallel(2))
    for text in ("pp=2,vpp=4,first=8", "tp=2,pp=3,ep=4,etp=2,dp=8,te", "tp=1"):
        assert trainer_text(parse_trainer(text)) == text
    for text in ("2xtp8ep4dp2pp3", "2xtp8pp3", "1xtp2"):
        assert engines_text(*parse_engines(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp",
        "tp=",
        "tp=x",
        "tp=-1",
        "tp=0",
        "tp=1.5",
        "tp=2,tp=4",
        "cp=0",
        "sp=2",
        "te=1",
        "tp=2;dp=2",
        "ep=3,dp=2",
        "vpp=2",
        "first=3",
        "pp=2,vpp=0",
    ],
)
def test_bad_trainers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_trainer(text)


@pytest.mark.parametrize(
    "text", ["", "8", "tp8", "0xtp8", "2xtp0", "2xtp8ep3", "2xtp8ep0", "2xep8", "2xtp8 ep8", "-1xtp8", "2xtp8dp3", "2xtp8pp2dp2"]
)
def test_bad_engines_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_engines(text)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bucket_bytes": 0}, "--bucket-bytes"),
        ({"dtype": "float12"}, "--dtype"),
        ({"dtype": "bool"}, "--dtype"),
        ({"trainer": "tp=3"}, "trainer.tp"),
        ({"engines": "1xtp3"}, "engines.tp"),
        ({"engines": "1xtp1pp3"}, "engines.pp"),
        ({"trainer": "pp=2,vpp=2"}, "trainer.vpp"),
        ({"trainer": "pp=2,first=2"}, "trainer.first_stage_layers"),
        ({"trainer": "dp=123456789"}, "ranks in all"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    arguments = {"trainer": "dp=2", "engines": "1xtp1", **changes}
    with pytest.raises(UserError, match=word):
        of(config(tmp_path), **arguments)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_speeds_are_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="--nic"):
        Speeds(nic=value)


def command(*arguments: object) -> tuple[int, str, str]:
    line = [sys.executable, "-m", "asyncmoe", "plan", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REAL["Qwen3-30B-A3B"]))
    file = tmp_path / "plan.json"
    code, out, _ = command("--model", tmp_path, "--trainer", "tp=2,ep=8,dp=8", "--engines", "2xtp4ep4", "--nic", 25, "--json", file)
    assert code == 0
    assert "expected at 25 GB/s" in out
    assert json.loads(file.read_text())["way"]["ratio"] == 1.0


@pytest.mark.parametrize(
    ("model", "trainer", "word"),
    [
        ("none", "dp=2", "no such directory"),
        ("other.json", "dp=2", "model_type"),
        ("broken.json", "dp=2", "JSON"),
        ("good.json", "tp=3", "tp"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, model: str, trainer: str, word: str) -> None:
    config(tmp_path).rename(tmp_path / "good.json")
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "broken.json").write_text("{")
    code, out, error = command("--model", tmp_path / model, "--trainer", trainer, "--engines", "1xtp1")
    assert code == 2
    assert out == ""
    assert len(error.strip().splitlines()) == 1
    assert word in error


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize(("experts", "billions"), [("per_expert", 3.38), ("shared_outer", 0.98)])
def test_an_adapter_of_a_real_model(tmp_path: Path, experts: str, billions: float) -> None:
    """Sizes at rank 32 as published for this model; one engine of one rank needs every byte once, and nothing else travels."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(REAL["Qwen3-30B-A3B"]))
    found = of(file, "tp=2,pp=2,ep=8,dp=4", "1xtp1", lora=f"rank=32,experts={experts}")
    assert found.model_bytes == pytest.approx(billions * 1e9, rel=0.01)
    assert found.way.bytes_wire == found.lower_bound == found.model_bytes
    whole = of(file, "tp=2,pp=2,ep=8,dp=4", "1xtp1")
    assert whole.way.nic_seconds > 10 * found.way.nic_seconds
    console = Console(record=True, width=200)
    show(found, console, 1)
    assert f"an adapter of rank 32 ({experts}: q_proj, k_proj" in console.export_text()


ODD = ["", "32", "rank=x", "rank=4,alpha=3", "rank=4,targets=lm_head", "rank=4,experts=all", "rank=4096", "rank=0", "rank=2,rank=4"]


@pytest.mark.parametrize("text", ODD)
def test_an_adapter_that_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--lora: |^lora\.(rank|targets|experts): got "):
        of(config(tmp_path), "tp=1", "1xtp1", lora=text)
