"""Which of Megatron's switches are on, from what is configured and what there is; and that Megatron takes each of them together."""

from __future__ import annotations

import itertools
import runpy
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from asyncmoe.config.trainer import MegatronSection, TrainerSection
from asyncmoe.errors import ConfigError
from asyncmoe.models import family_of
from asyncmoe.platform import kernels, megatron
from asyncmoe.platform.kernels import Kernels
from asyncmoe.trainer.model import switches
from asyncmoe.trainer.model.switches import RunFeatures, decide

megatron.prepare()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402
from megatron.core.transformer.moe import fused_a2a, moe_utils  # noqa: E402

from asyncmoe.trainer.model import layers  # noqa: E402
from tests import families  # noqa: E402
from tests.ranks import case  # noqa: E402

BARE = Kernels(cuda=True, capability=(9, 0))
ENGINE = replace(BARE, transformer_engine=(2, 20, 2))
MACHINES = {
    "no GPU": Kernels(),
    "bare": BARE,
    "Volta": replace(BARE, capability=(7, 0)),
    "old engine": replace(BARE, transformer_engine=(2, 6)),
    "Ampere": replace(ENGINE, capability=(8, 0)),
    "engine": ENGINE,
    "all": replace(ENGINE, lacks_deep_ep=""),
}
PLAIN = RunFeatures((2048, 768), False, True, False, False, False, 1)
RUNS = {
    "plain": PLAIN,
    "live routing": replace(PLAIN, keeps_routing=False),
    "live routing, seldom published": replace(PLAIN, keeps_routing=False, published_every=2),
    "adapters": replace(PLAIN, lora=True, expert_widths=(2048, 768, 16)),
    "latent": replace(PLAIN, latent=True),
    "interleaved rope": replace(PLAIN, interleaved_rope=True),
    "dense": replace(PLAIN, expert_widths=(), keeps_routing=False),
    "odd widths": replace(PLAIN, expert_widths=(2048, 764)),
    "seldom published": replace(PLAIN, published_every=4),
    "float32": replace(PLAIN, float32=True),
}
NEEDY = {
    "offload": {"memory": {"optimizer_offload": 1.0}},
    "float8": {"precision": "fp8"},
    "averages": {"memory": {"exp_avg_dtype": "bfloat16"}},
}
"""Settings that save memory on GPUs."""
TRAINERS: dict[str, dict[str, Any]] = {"alone": {"ranks": 1, "ep": 1}, **NEEDY}
"""Keys of a trainer that differ from those of four ranks, among which the experts are spread."""
BOOLS = [name for name, field in MegatronSection.model_fields.items() if field.annotation == bool | None]


def decided(machine: str, run: str = "plain", **wanted: Any) -> switches.Switches:
    """The switches of a run of `RUNS`, or of a plain one of `TRAINERS`."""
    trainer = TrainerSection.model_validate({"ranks": 4, "ep": 4, **TRAINERS.get(run, {}), "megatron": wanted})
    return decide(trainer, MACHINES[machine], RUNS.get(run, PLAIN))


def test_everything_is_on_where_everything_is() -> None:
    on = decided("all", "live routing, seldom published", moe_token_dispatcher_type="flex")
    assert on == switches.Switches(True, "transformer_engine", *[True] * 8)
    assert on.text.endswith("; off: nothing")


def test_without_a_gpu_nothing_is_on() -> None:
    on = decided("no GPU")
    assert on == switches.Switches(False, "sequential", *[False] * 8)
    assert on.text.startswith("experts: sequential; on: nothing; off: transformer_engine, moe_permute_fusion,")


@pytest.mark.parametrize(
    ("machine", "run", "name"),
    [
        ("bare", "plain", "transformer_engine"),
        ("old engine", "plain", "transformer_engine"),
        ("engine", "plain", "moe_router_fusion"),  # routing is kept
        ("engine", "latent", "apply_rope_fusion"),
        ("engine", "interleaved rope", "apply_rope_fusion"),
        ("engine", "adapters", "gradient_accumulation_fusion"),
        ("engine", "dense", "moe_permute_fusion"),
        ("engine", "alone", "overlap_grad_reduce"),
        ("engine", "plain", "overlap_param_gather"),  # published after every step
        ("engine", "adapters", "overlap_param_gather"),
        ("bare", "seldom published", "overlap_param_gather"),
    ],
)
def test_what_cannot_be_is_off(machine: str, run: str, name: str) -> None:
    assert not getattr(decided(machine, run), name)


def test_experts_are_grouped_by_whoever_can() -> None:
    who = {machine: decided(machine).experts for machine in MACHINES}
    assert who["engine"] == who["all"] == "transformer_engine"
    assert who["bare"] == who["old engine"] == "torch"
    assert who["no GPU"] == who["Volta"] == "sequential"
    assert decided("bare", "adapters").experts == "torch"
    assert decided("bare", "float32").experts == "sequential"
    assert decided("bare", "float32", moe_grouped_gemm=True).experts == "torch"
    assert decided("no GPU", moe_grouped_gemm=True).experts == "torch"
    assert decided("engine", transformer_impl="local").experts == "torch"


@pytest.mark.parametrize(
    ("wanted", "machine", "run", "said"),
    [
        ({}, "no GPU", "offload", "trainer.memory.optimizer_offload: got 1 on a machine without a GPU"),
        ({}, "no GPU", "float8", "trainer.precision: got fp8 on a machine without a GPU"),
        ({}, "Ampere", "float8", "capability 9.0"),
        ({}, "bare", "float8", "Transformer Engine is not installed"),
        ({}, "old engine", "float8", "Transformer Engine is 2.6, older than 2.7"),
        ({}, "bare", "averages", "trainer.memory.exp_avg_dtype: got bfloat16, expected float32"),
        ({"transformer_impl": "transformer_engine"}, "no GPU", "plain", "there is no GPU"),
        ({"moe_grouped_gemm": False}, "engine", "plain", "experts are grouped"),
        ({"moe_grouped_gemm": True}, "no GPU", "dense", "no experts"),
        ({"overlap_param_gather": True}, "engine", "adapters", "adapters"),
        ({"overlap_param_gather": True}, "engine", "alone", "not sharded"),
        ({"moe_token_dispatcher_type": "flex"}, "engine", "plain", f"alltoall because {ENGINE.lacks_deep_ep}; leave it out"),
        ({"moe_token_dispatcher_type": "flex"}, "all", "alone", "rows do not travel between ranks"),
        ({"moe_token_dispatcher_type": "flex"}, "all", "dense", "no experts"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(wanted: dict[str, Any], machine: str, run: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decided(machine, run, **wanted)
    line = str(caught.value)
    assert said in line
    assert all(f"trainer.megatron.{name}: got " in line for name in wanted)
    assert "\n" not in line


@pytest.mark.parametrize("run", NEEDY)
def test_what_the_machine_has_is_not_refused(run: str) -> None:
    assert decided("engine", run) == decided("engine")


def test_every_combination_is_decided_or_refused() -> None:
    """What is asked for is on or refused, what is forbidden is off."""
    for machine, run, name, value in itertools.product(MACHINES, (*RUNS, "alone"), BOOLS, (True, False, None)):
        try:
            on = decided(machine, run, **{name: value})
        except ConfigError:
            assert value is not None
            continue
        found = on.experts != "sequential" if name == "moe_grouped_gemm" else getattr(on, name)
        assert value is None or found == value
        assert not (RUNS.get(run, PLAIN).keeps_routing and on.moe_router_fusion)


@pytest.mark.parametrize("lacks", ["", "Buffer", "EventHandle", "EventOverlap"])
def test_deep_ep_is_judged_as_megatron_judges_it(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, parts in {"deep_ep": {"Buffer"}, "deep_ep.utils": {"EventHandle", "EventOverlap"}}.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(dict.fromkeys(parts - {lacks}))
    found = kernels._lacks_deep_ep()
    assert (lacks in found, found == "") == (True, runpy.run_path(fused_a2a.__file__)["HAVE_DEEP_EP"])


def test_switches_have_megatrons_names() -> None:
    known = {field.name for field in fields(transformer_config.TransformerConfig)} | {
        field.name for field in fields(DistributedDataParallelConfig)
    }
    assert set(MegatronSection.model_fields) <= known
    assert {field.name for field in fields(switches.Switches)} - {"transformer_engine", "experts", "flex"} <= known


@pytest.fixture
def engine_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Megatron's own validation looks for."""
    for name in ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute"):
        assert f"fused_{name}" in Path(moe_utils.__file__).read_text()
        monkeypatch.setattr(moe_utils, f"fused_{name}", object(), raising=False)
    assert hasattr(rope_utils, "fused_apply_rotary_pos_emb")
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", object())
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_, **__: True)


@pytest.mark.usefixtures("engine_is_there")
@pytest.mark.parametrize("variant", ["plain", "dense", *case.FAMILIES])
def test_megatron_takes_what_is_decided(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = case.VARIANTS[variant]
    for machine, there in MACHINES.items():
        monkeypatch.setattr(layers.kernels, "detect", lambda there=there: there)
        for sizes, lora, keep in itertools.product(({}, {"tp": 2}, {"ep": 2}, {"pp": 2, "vpp": 2}), (False, True), ("auto", "off")):
            if "ep" in sizes and hf["model_type"] in families.DENSE:
                continue
            flex = {"moe_token_dispatcher_type": "flex"} if machine == "all" and "ep" in sizes else {}
            config = case.config(tmp_path, ranks=4, megatron=flex, optimizer={"distributed": None}, **sizes)
            config = config.model_copy(
                update={"train": "lora" if lora else "full", "keep": config.keep.model_copy(update={"routing": keep})}
            )
            family, _ = family_of(hf).megatron_config(hf)
            on = layers.switches(hf, config, torch.bfloat16)
            made = layers.transformer_config(family, config, torch.device("cpu"), torch.bfloat16, on)
            assert made.moe_token_dispatcher_type == ("flex" if flex else "alltoall")
            assert made.moe_grouped_gemm == (on.experts == "transformer_engine")
            assert layers.ddp_config(config, on).overlap_grad_reduce == on.overlap_grad_reduce == (there.cuda and config.trainer.dp > 1)
