"""The tiny run of the bundle for GPU machines: which SGLang servers it tries, what stands in for their kernels, and what a card runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from doctor_machines import NODE, but, shown

from asyncmoe.config import devices, parse
from asyncmoe.doctor.facts import GpuFacts
from asyncmoe.doctor.planned import PlannedRun
from asyncmoe.launch import gpus, preflight
from asyncmoe.models.make import make_model
from asyncmoe.plan import budget
from asyncmoe.platform.sglang.patching import PatchTargetGone
from asyncmoe.trajectory import Routing
from benchmarks.trajectories import demonstrations
from tests.gpu.bundle import parts, pretended, pretended_card, servers, tiny_run, triton_experts, without_kernels
from tests.gpu.bundle.summary import read_outcome

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
GOOD = {
    "steps": tiny_run.STEPS,
    "max_abs_logprob_diff_same_version": 1e-4,
    "sync_seconds_median": 0.1,
    "pause_ms_median": 9.0,
    "tokens_per_s": 50.0,
}
H200 = GpuFacts(0, "NVIDIA H200", 143771, 4, "Default", "9.0")


# ---------------------------------------------------------------- which servers


def test_a_card_without_sglangs_kernels_tries_the_better_first() -> None:
    assert servers.ladder(card=True, whole=True, triton=True) == (servers.WHOLE,)
    assert servers.ladder(card=True, whole=False, triton=True) == (servers.GRAPHS, servers.EXPERTS, servers.PLAIN)
    assert servers.ladder(card=True, whole=False, triton=False) == (servers.PLAIN,)
    assert servers.ladder(card=False, whole=False, triton=True) == (servers.PLAIN,)
    assert not servers.ladder(card=False, whole=True, triton=False)[0].bare
    assert len({server.says for server in servers.KNOWN.values() if server.bare}) == 4


def test_graphs_are_asked_for_only_where_attention_takes_them() -> None:
    defaults = ("--attention-backend", "torch_native", "--disable-cuda-graph", "--device", "cpu")
    on_card = servers.arguments(servers.GRAPHS, True, defaults)
    assert "--disable-cuda-graph" not in on_card
    assert [value for flag, value in pairwise(on_card) if flag == "--attention-backend"][-1] == "triton"
    assert [value for flag, value in pairwise(on_card) if flag == "--device"][-1] == "cuda"
    for server, card in ((servers.GRAPHS, False), (servers.EXPERTS, True), (servers.PLAIN, True)):
        assert "--disable-cuda-graph" in servers.arguments(server, card, defaults)
    assert "cuda" not in servers.arguments(servers.GRAPHS, False, defaults)


# ---------------------------------------------------------------- falling back


def run_with(outcomes: dict[str, Any], names: list[str], monkeypatch: pytest.MonkeyPatch, result: Path) -> list[tuple[str, float]]:
    """Run the part with attempts that end as said; returns those made and the seconds each was given."""
    made: list[tuple[str, float]] = []

    def attempt(server: servers.Server, limit: float) -> Any:
        made.append((server.name, limit - time.monotonic()))
        if isinstance(outcomes[server.name], str):
            raise tiny_run.NotServed(outcomes[server.name])
        return outcomes[server.name]

    monkeypatch.setattr(tiny_run, "attempt", attempt)
    monkeypatch.setattr(sys, "argv", ["tiny_run", *names, str(result)])
    tiny_run.main()
    return made


def test_it_falls_back_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = tmp_path / "tiny-run.json"
    outcomes = {"graphs": "controller: engine.0 did not start: no kernel", "experts": GOOD}
    made = run_with(outcomes, ["graphs", "experts", "plain"], monkeypatch, result)
    assert [name for name, _ in made] == ["graphs", "experts"]
    _, figures = read_outcome(result)
    assert figures["server"].value == "Triton's experts, torch's attention"
    assert figures["not_graphs"].value == outcomes["graphs"]
    assert figures["not_graphs"].unit == "Triton's experts and attention, CUDA graphs"
    assert "not_experts" not in figures
    assert figures["dtype"].value == "bfloat16"


def test_every_server_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = dict.fromkeys(("graphs", "experts", "plain"), "it fell")
    monkeypatch.setenv("ASYNCMOE_BUNDLE_SECONDS", "150")
    with pytest.raises(SystemExit, match=r"no server carried it; Triton's experts and .*: it fell; .*torch's operators"):
        run_with(failing, [*failing], monkeypatch, tmp_path / "r.json")
    assert [*read_outcome(tmp_path / "r.json")[1]] == ["not_graphs", "not_experts", "not_plain"]
    monkeypatch.setenv("ASYNCMOE_BUNDLE_SECONDS", "110")
    made = run_with({**failing, "plain": GOOD}, [*failing], monkeypatch, tmp_path / "r.json")
    assert [name for name, _ in made] == ["experts", "plain"], "graphs would have left the others nothing"
    assert all(given < 110 - 45 * later for later, (_, given) in zip((1, 0), made, strict=True))
    assert str(read_outcome(tmp_path / "r.json")[1]["not_graphs"].value).startswith("not tried: ")


def test_a_server_that_computes_wrongly_is_no_reason_to_try_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outcomes = {"graphs": GOOD | {"max_abs_logprob_diff_same_version": 2.0}, "plain": GOOD}
    with pytest.raises(SystemExit, match=r"got a difference of 2\.0 nats"):
        run_with(outcomes, ["graphs", "plain"], monkeypatch, tmp_path / "r.json")
    assert read_outcome(tmp_path / "r.json")[1]["server"].value == servers.GRAPHS.says


def test_the_cause_is_the_last_line_of_what_failed(tmp_path: Path) -> None:
    (tmp_path / "controller.log").write_text("Traceback\n  ...\nEngineError: engine.0 did not start: no kernel\n\n")
    (tmp_path / "trainer.log").write_text("lost the controller\n")
    assert tiny_run.cause({"trainer": 1, "controller": 1}, tmp_path) == "controller: EngineError: engine.0 did not start: no kernel"
    assert tiny_run.cause({"trainer": 1, "controller": None}, tmp_path) == "trainer: lost the controller"
    assert tiny_run.cause({"trainer": None, "controller": None}, tmp_path) == "it took too long; ended: none"
    (tmp_path / "engine-0.log").write_text("RuntimeError: 0 active drivers\nConnectionError: Connection refused\n")
    (tmp_path / "controller.log").write_text("EngineError: no engine is left: Server disconnected\n")
    said = tiny_run.cause({"trainer": 1, "controller": 1}, tmp_path)
    assert said == "RuntimeError: 0 active drivers (controller: EngineError: no engine is left: Server disconnected)"


# ---------------------------------------------------------------- on a card


def test_its_configuration_on_a_card_is_what_a_run_accepts(tmp_path: Path) -> None:
    config = parse(tiny_run.configuration(tmp_path, True, servers.GRAPHS))
    assert config.model.make is not None
    make_model(config.model.path, config.model.make, seed=0)
    hf = budget.hf_of(config)
    (wanted,) = devices.wanted(config, several=False)
    placed = devices.place(wanted, 1)
    assert (placed.trainer, placed.engines, placed.shared) == ((0,), ((0,),), (0,))
    gpus.check(config, 0, 1)
    machine = but(NODE, nvidia__gpus=(H200,), nvidia__on_bus=1, trainer__torch__shown=shown(H200), run=PlannedRun(config, hf))
    assert preflight.judge(machine) == ()
    small = replace(H200, memory_mib=24000)
    for card in (H200, small):
        gigabytes = card.memory_mib * (1 << 20) / 1e9
        assert budget.of_run(config, hf, gigabytes).fits
        assert "--mem-fraction-static" in budget.engine_arguments(config, hf, gigabytes)
    script = (tmp_path / "python").read_text()
    assert f"{servers.MODE}=graphs" in script
    assert "tests.gpu.bundle.bare_server" in script


def test_parts_that_wait_for_others_work_find_it() -> None:
    wanted = {part.name: part for part in parts.PARTS}
    assert wanted["overlap"].arguments == ("tests/gpu", "-k", "overlap")
    assert "\ndef test_" in (ROOT / "tests" / "gpu" / "test_overlap_gpu.py").read_text()
    assert "import gpu_hash" in (ROOT / "tests" / "gpu" / "bundle" / "checksums.py").read_text()


# ---------------------------------------------------------------- what stands in for kernels


def plainly(ids: list[int], experts: int, block: int) -> tuple[list[int], list[int]]:
    """Choices in the order of their experts, each expert's filled up to whole blocks with their number; and the expert of each block."""
    order, blocks = [], []
    for expert in range(-1, experts):
        mine = [index for index, chosen in enumerate(ids) if chosen == expert]
        mine += [len(ids)] * (-len(mine) % block)
        order += mine
        blocks += [expert] * (len(mine) // block)
    return order, blocks


@pytest.mark.parametrize(("tokens", "k", "experts", "block"), [(1, 2, 8, 16), (5, 2, 8, 16), (40, 3, 8, 64), (7, 2, 3, 4), (33, 4, 60, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_blocks_are_in_the_order_of_their_experts(tokens: int, k: int, experts: int, block: int, dtype: Any, elsewhere: bool) -> None:
    random = np.random.default_rng(tokens)
    ids = np.argsort(random.random((tokens, experts)), axis=1)[:, :k]
    if elsewhere:
        ids = np.where(random.random(ids.shape) < 0.3, -1, ids)
    order, blocks = plainly(ids.flatten().tolist(), experts, block)
    # As SGLang sizes them (moe_align_block_size of triton_utils); -7: what was there before.
    size = tokens * k + (experts + 1) * (block - 1) if tokens * k > experts else tokens * k * block
    made, expert_of, padded = (torch.full((n,), -7, dtype=torch.int32) for n in ((size + 3) // 4 * 4, -(-size // block), 1))
    with pretended_card.Refusing():  # a CUDA graph captures it
        triton_experts.align(torch.tensor(ids, dtype=dtype), experts + 1, block, made, expert_of, padded, torch.empty(experts + 2), True)
    assert padded.item() == len(order)
    assert made[: len(order)].tolist() == order
    assert expert_of[: len(blocks)].tolist() == blocks
    assert set(made[len(order) :].tolist()) <= {tokens * k}
    assert set(expert_of[len(blocks) :].tolist()) <= {-1}


PATCHED = {
    "srt/utils/common.py": ("def is_cuda(", "def is_cpu(", "def is_cuda_alike("),
    "kernels/spec.py": ("class PlatformInfo(", "    def detect(cls)"),
    "srt/layers/moe/moe_runner/triton_utils/moe_align_block_size.py": ("def moe_align_block_size(", "        sgl_moe_align_block_size("),
    "srt/layers/quantization/unquant.py": ("class UnquantizedFusedMoEMethod(", "    def forward_cuda(", "    forward_native = forward_cpu"),
    "srt/arg_groups/fields/exec_.py": ("cuda_graph_backend_prefill:", "cuda_graph_bs_decode:"),
}
"""File of SGLang 0.5.23 -> what the stand-ins and the arguments rely on there."""


@pytest.mark.parametrize("file", PATCHED)
def test_what_is_replaced_is_there(file: str) -> None:
    found = [*ROOT.glob(f".venv-engine/lib/python3*/site-packages/sglang/{file}")]
    if not found:
        pytest.skip("SGLang is not installed in .venv-engine")
    source = found[0].read_text()
    assert [part for part in PATCHED[file] if part not in source] == []


def test_on_a_card_layers_are_a_cpus_and_streams_the_cards() -> None:
    common, spec = ModuleType("common"), ModuleType("spec")
    vars(common).update(is_cuda=lambda: True, is_cpu=lambda: False, is_cuda_alike=lambda: common.is_cuda())
    without_kernels._torchs_operators(common)
    assert (common.is_cuda(), common.is_cpu(), common.is_cuda_alike()) == (False, True, True)
    spec.PlatformInfo = type("PlatformInfo", (), {"detect": classmethod(lambda cls: "cuda"), "device_type": "cpu"})  # type: ignore[attr-defined]
    without_kernels._no_compiler(spec)
    assert spec.PlatformInfo.detect().device_type == "cpu"
    for patch in (without_kernels._torchs_operators, without_kernels._no_compiler, triton_experts._align, triton_experts._method):
        with pytest.raises(PatchTargetGone, match="is gone"):
            patch(ModuleType("another version"))


def test_sglangs_names_lead_to_the_stand_ins() -> None:
    align, method = ModuleType("align"), ModuleType("method")
    vars(align)["moe_align_block_size"] = lambda *_: None
    triton_experts._align(align)
    assert align.sgl_moe_align_block_size is triton_experts.align
    methods = {"forward_native": lambda self: "torch", "forward_cuda": lambda self: "triton"}
    vars(method)["UnquantizedFusedMoEMethod"] = type("UnquantizedFusedMoEMethod", (), methods)
    triton_experts._method(method)
    assert method.UnquantizedFusedMoEMethod().forward_native() == "triton"


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or importlib.util.find_spec("sglang") is None,
    reason="triton or sglang is not installed here; the bundle's part `experts` runs this where they are",
)
def test_sglangs_triton_experts_are_its_plain_ones(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.gpu.bundle.triton_experts", str(tmp_path / "r.json")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    written = json.loads((tmp_path / "r.json").read_text())
    if written["skipped"]:
        pytest.skip(written["skipped"])
    figures = written["figures"]
    assert figures["difference"]["value"] <= triton_experts.CLOSE
    assert figures["device"]["value"] == "Triton's interpreter"


# ---------------------------------------------------------------- what steps are compared on


def test_random_trajectories_are_the_same_everywhere_with_experts_where_asked() -> None:
    routing = Routing(layers=(1, 2), all_layers=3, top_k=2, experts=8)
    plain, routed = demonstrations(2, 9, 50, None), demonstrations(2, 9, 50, routing)
    assert [trajectory.routes for trajectory in plain] == [None, None]
    again = demonstrations(2, 9, 50, routing)
    for one, same in zip(routed, again, strict=True):
        assert (one.tokens == same.tokens).all()
        assert one.tokens.max() < 50
        assert one.routes is not None
        assert same.routes is not None
        assert one.routes.rows == len(one.tokens) - 1
        assert one.routes.digests == same.routes.digests
    assert routed[0].routes.digests != routed[1].routes.digests  # type: ignore[union-attr]


# ---------------------------------------------------------------- the card that is not there


def test_a_pretended_graph_computes_again_and_refuses_what_waits() -> None:
    given, kept = torch.ones(3), torch.zeros(3)
    graph = pretended_card.Graph()
    with pretended_card.capture(graph):
        doubled = given * 2
        kept.add_(doubled.view(3))
    given.fill_(5.0)
    graph.replay()
    assert doubled.tolist() == [10.0] * 3
    assert kept.tolist() == [12.0] * 3
    for waits in (lambda: given[0].item(), lambda: given.nonzero(), lambda: given[given > 1]):
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), pretended_card.capture(pretended_card.Graph()):
            waits()


def test_answers_are_compared_up_to_the_first_other_token() -> None:
    first = [([1, 2, 3], [-1.0, -2.0, -3.0]), ([4], [-1.0])]
    second = [([1, 2, 9], [-1.0, -2.25, -9.0]), ([4], [-1.0])]
    assert pretended.compared(first, second) == [0.0, 0.25, 0.0]
    assert pretended.compared(first, first) == [0.0] * 4
