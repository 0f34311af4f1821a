"""Under every layout, adapters compute what W + (alpha / rank) B A computes on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncmoe.models import family_of, load_hf_config
from asyncmoe.models.lora.adapter import kind_of
from tests.ranks import case, launch, lora_case, lora_oracle, oracle, test_parity

pytestmark = pytest.mark.ranks

LAYOUTS = {
    name: test_parity.LAYOUTS[name] for name in ("1", "dp2", "tp2", "pp2", "ep2", "cp2", "pp2xvpp2", "tp2xep2", "tp2xep2xetp2", "pp2xep2")
}
LAYOUTS["ep2xetp2"] = (4, "ep=2,etp=2")
FEW = {
    ("1", "per-expert"): ("packed", "plain"),
    ("1", "shared-outer"): ("packed", "recompute", "bfloat16"),
    ("1", "dense"): ("packed",),
    ("1", "attention"): ("packed",),
    ("tp2", "per-expert"): ("packed", "recompute", "distributed", "gathered"),
    ("tp2", "shared-outer"): ("packed", "plain", "start"),
    ("tp2", "some"): ("packed",),
    ("tp2", "deepseek"): ("packed", "distributed"),
    ("pp2", "per-expert"): ("packed", "plain", "start", "gathered"),
    ("pp2", "tied"): ("packed", "distributed"),
    ("ep2", "per-expert"): ("packed", "start", "gathered"),
    ("ep2", "shared-outer"): ("packed", "recompute", "distributed", "start"),
    ("ep2", "experts"): ("packed",),
    ("tp2xep2", "per-expert"): ("packed",),
    ("tp2xep2", "shared-outer"): ("packed", "distributed", "gathered"),
}
"""By layout and adapter, where each is something else; all others in a thorough test."""
EVERY = {
    (layout, adapter): lora_case.checks(adapter) for layout in LAYOUTS for adapter in lora_case.tried(case.settings_of(LAYOUTS[layout][1]))
}


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    path = tmp_path_factory.mktemp("lora")
    wanted = sorted(lora_case.ADAPTERS if thorough else {*lora_case.IN_PEFT, *(name for _, name in FEW)})
    variants = {name: lora_case.ADAPTERS[name][0] for name in wanted}
    for variant in sorted(set(variants.values())):
        oracle.write(path / variant, variant, trained=False)
    for name, variant in variants.items():
        lora_oracle.write(path / variant, name)
    return path


@pytest.fixture(scope="session")
def found(references: Path, thorough: bool) -> Callable[[str], dict[str, Any]]:
    return launch.by_layout("lora", LAYOUTS, EVERY if thorough else FEW, references, 1800.0 if thorough else 600.0)


@pytest.mark.parametrize(("layout", "adapter", "how"), launch.marked(EVERY, FEW))
def test_a_layout_computes_what_one_process_does(found: Callable[[str], dict[str, Any]], layout: str, adapter: str, how: str) -> None:
    CHECKS[how](found(layout)[adapter][how])


def check_parity(errors: dict[str, Any]) -> None:
    assert errors["logits"] < 1e-4
    assert errors["base"] < 1e-4
    assert errors["apart"] > 0.1
    for loss in ("supervised", "policy"):
        assert errors[f"{loss}_loss"] < 1e-5
        assert errors[f"{loss}_norm"] < 1e-4
        assert errors[f"{loss}_gradients"] < 1e-4


def check_training(errors: dict[str, Any]) -> None:
    """Three steps."""
    assert errors["halves"] < 2e-5
    assert errors["losses"] < 1e-5
    assert errors["norms"] < 1e-4
    assert errors["frozen"]
    assert errors.get("state", True)


def check_start(errors: dict[str, Any]) -> None:
    """Training starts from the same values, and from the base model."""
    assert errors["equal"]
    assert errors["distinct"]
    assert errors["b"] == 0
    assert errors["a"] < 0.1  # the largest of many uniform draws is near the bound
    assert errors["logits"] < 1e-4


def check_gathered(errors: dict[str, Any]) -> None:
    assert errors["right"]
    assert errors["bytes"]
    assert errors["buckets"] > 3


def check_half(errors: dict[str, Any]) -> None:
    assert errors["plain"] < 0.1
    assert errors["distributed"] == pytest.approx(errors["plain"], abs=0.02)


CHECKS = {
    **{"packed": check_parity, "recompute": check_parity, "plain": check_training, "distributed": check_training},
    **{"start": check_start, "gathered": check_gathered, "bfloat16": check_half},
}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [pytest.param(4, "tp=2,pp=2,ep=2", id="tp2xpp2xep2"), pytest.param(2, "ep=2", id="ep2", marks=pytest.mark.thorough)],
)
def test_what_is_exported_gives_the_same_logits(references: Path, tmp_path: Path, ranks: int, layout: str) -> None:
    """In PEFT, as an adapter; in transformers, merged into the weights; and in the trainer, merged."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    errors = launch.run("lora_export", ranks, tmp_path, str(references), str(tmp_path), layout)
    for name in lora_case.BOTH:
        path = references / lora_case.ADAPTERS[name][0]
        wanted = torch.load(path / f"{name}.pt", weights_only=False)["logits"]
        base = AutoModelForCausalLM.from_pretrained(path / "hf", attn_implementation="eager").eval()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / name / "merged", attn_implementation="eager").eval()
        before = {n: value.clone() for n, value in base.state_dict().items() if not torch.equal(value, merged.state_dict()[n])}
        with torch.no_grad():
            plain = [oracle._logits(base, ids) for ids in case.tokens()]
            adapted = PeftModel.from_pretrained(base, tmp_path / name / "adapter").eval()
            found = {
                kind: apart([oracle._logits(model, ids) for ids in case.tokens()], wanted)
                for kind, model in (("PEFT", adapted), ("merged", merged))
            }
        assert merged.dtype == torch.float32
        exact = {n: value.bfloat16().float() + (merged.state_dict()[n] - value) for n, value in before.items()}
        rounded = sum(float((value.bfloat16().float() - value).square().sum()) for value in exact.values())
        added = sum(float((merged.state_dict()[n] - value).square().sum()) for n, value in before.items())
        assert errors[f"{name} lost"] == pytest.approx((rounded / added) ** 0.5, rel=0.1)
        print(f"{layout} {name}: {found}, in the trainer {errors[name]:.1e}")
        assert max(*found.values(), errors[name]) < 1e-4
        assert apart(plain, wanted) > 0.1


def apart(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.thorough
def test_the_layers_of_transformer_engine(references: Path) -> None:
    """Tested as far as possible without a GPU: with stand-ins for its layers, inside Megatron's."""
    found = launch.run("lora_grouped", 4, references, str(references), "tp=2,ep=2", "ep=2,etp=2", "tp=2,pp=2")
    for adapters in found.values():
        assert len(adapters) == 6
        for errors in adapters.values():
            check_parity(errors)


@pytest.mark.parametrize("name", lora_case.IN_PEFT)
def test_the_oracle_is_peft(references: Path, name: str) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    path, section = references / lora_case.ADAPTERS[name][0], lora_case.section(name)
    found, known = (torch.load(path / file, weights_only=False) for file in (f"{name}.pt", "reference.pt"))
    base = AutoModelForCausalLM.from_pretrained(path / "hf", attn_implementation="eager").eval()
    hf = load_hf_config(path / "hf")
    targets = list(kind_of(section, family_of(hf).shape_of(hf)).targets)
    model = get_peft_model(base, LoraConfig(r=section.rank, lora_alpha=section.alpha, target_modules=targets)).eval()
    halves = {canonical(key): p for key, p in model.named_parameters() if p.requires_grad}
    assert halves.keys() == found["halves"].keys()
    with torch.no_grad():
        for key, half in halves.items():
            half.copy_(found["halves"][key])
        logits = [oracle._logits(model, ids) for ids in case.tokens()]
    assert max(float((a - b).abs().max()) for a, b in zip(logits, found["logits"], strict=True)) < 1e-5
    loss = oracle._supervised(model, known["behaviour"], known["proximal"])
    loss.backward()
    for key, half in halves.items():
        wanted = found["supervised"]["gradients"][key]
        assert float((half.grad - wanted).abs().max() / wanted.abs().max()) < 1e-4


def canonical(name: str) -> str:
    """base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight -> layers.0.q_proj.a"""
    _, _, _, layers, number, _, projection, side, *_ = name.split(".")
    return f"{layers}.{number}.{projection}.{side[-1].lower()}"
