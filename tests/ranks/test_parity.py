"""Every layout computes the same as Hugging Face's model and autograd in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import case, launch, oracle

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "1": (1, "tp=1"),
    "dp2": (2, "tp=1"),
    "tp2": (2, "tp=2"),
    "pp2": (2, "pp=2"),
    "pp2-uneven": (2, "pp=2,first_stage_layers=1"),
    "pp2xvpp2": (2, "pp=2,vpp=2"),
    "ep2": (2, "ep=2"),
    "tp2xetp2": (2, "tp=2,etp=2"),
    "tp2xep2": (4, "tp=2,ep=2"),
    "tp2xep2xetp2": (4, "tp=2,ep=2,etp=2"),
    "pp2xep2": (4, "pp=2,ep=2"),
    "pp2xtp2": (4, "tp=2,pp=2"),
    "pp2xvpp2xep2": (4, "pp=2,vpp=2,ep=2"),
    "cp2": (2, "cp=2"),
    "cp2xep2": (2, "cp=2,ep=2"),
    "cp4": (4, "cp=4"),
    "cp2xdp2": (4, "cp=2,tp=1"),
    "cp2xtp2": (4, "tp=2,cp=2"),
    "cp2xpp2": (4, "cp=2,pp=2"),
    "cp2xpp2xvpp2": (4, "cp=2,pp=2,vpp=2"),
    "cp2xtp2xep2": (4, "tp=2,cp=2,ep=2"),
}
SWITCHED = dict.fromkeys(("ep2", "pp2xvpp2", "tp2xep2xetp2"), ("overlapped", "grouped"))
FAMILIES = {variant for variant, model in case.VARIANTS.items() if model["model_type"] not in ("qwen3", "qwen3_moe")}


def every_check(layout: str, variant: str) -> tuple[str, ...]:
    """The checks of a layout and a variant of the model in a thorough test."""
    if variant != "plain":
        return ("packed", "plain", *(("balanced",) if "n_routed_experts" in case.VARIANTS[variant] else ()))
    often = ("packed", "single", "recompute", "plain", "distributed", "guard", "rejected", "credited", "bfloat16")
    return (*often, *SWITCHED.get(layout, ()))


OTHERS = {("pp2", "tied"), ("1", "dense"), ("tp2", "dense-tied"), ("cp2xep2", "deepseek")}
OTHERS |= {("1", variant) for variant in FAMILIES - {"llama-tied", "glm-air"}}
FEW = {
    ("1", "plain"): ("packed", "single", "plain", "distributed", "guard", "rejected", "credited", "bfloat16"),
    ("tp2", "plain"): ("packed", "recompute", "plain", "bfloat16"),
    ("pp2", "plain"): ("packed", "plain", "guard"),
    ("pp2xvpp2", "plain"): ("packed", "recompute", "distributed", "overlapped", "grouped"),
    ("ep2", "plain"): ("packed", "single", "distributed", "overlapped", "grouped", "guard", "rejected", "credited"),
    ("cp2xep2", "plain"): ("packed", "plain", "rejected", "credited"),
    ("tp2xep2xetp2", "plain"): ("packed", "distributed"),
    ("pp2xep2", "plain"): ("packed", "distributed"),
    ("cp2xtp2xep2", "plain"): ("packed", "distributed"),
    **{one: every_check(*one) for one in OTHERS},
}
"""Otherwise: each way of splitting a model with packed rows and an optimizer, each other check where it meets what others compute (all
tokens on other ranks: guard, rejected, credited; other stages: recompute; other shards: bfloat16), and each variant where it is something
else."""
EVERY = {
    (layout, variant): every_check(layout, variant) for layout in LAYOUTS for variant in case.variants(case.settings_of(LAYOUTS[layout][1]))
}


Found = dict[str, dict[str, dict[str, Any]]]
"""What a layout made of each variant in each check."""


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    path = tmp_path_factory.mktemp("parity")
    for variant in dict.fromkeys(variant for _, variant in (EVERY if thorough else FEW)):
        oracle.write(path / variant, variant)
    return path


@pytest.fixture(scope="session")
def found(references: Path, thorough: bool) -> Callable[[str], Found]:
    return launch.by_layout("parity", LAYOUTS, EVERY if thorough else FEW, references, 900.0, alone=thorough)


@pytest.mark.parametrize(("layout", "variant", "how"), launch.marked(EVERY, FEW))
def test_a_layout_computes_what_one_process_does(found: Callable[[str], Found], layout: str, variant: str, how: str) -> None:
    errors = found(layout)[variant][how]
    print(f"{variant} {layout} {how}:", {name: f"{value:.1e}" for name, value in errors.items() if isinstance(value, float)})
    CHECKS[how](errors)
    if variant == "plain" and how in ("packed", "single"):
        alone = found("1")["plain"]["single"]
        assert errors["metrics"] == pytest.approx(alone["metrics"], abs=2e-5)
        assert errors["counts"] == alone["counts"]
    if (layout, how) == ("ep2", "single"):
        assert errors["filler"] == 1, "seven trajectories one by one on two data-parallel ranks"


def check_parity(errors: dict[str, Any]) -> None:
    assert errors["logits"] < 1e-4
    assert errors["logprobs"] < 1e-4
    assert errors["sampled_only"] < 1e-6
    for loss in ("supervised", "policy"):
        assert errors[f"{loss}_loss"] < 1e-5
        assert errors[f"{loss}_norm"] < 1e-4
        assert errors[f"{loss}_gradients"] < 1e-4
    assert errors["unchanged"]  # a learning rate of 0
    assert 0 <= errors["same_version"] < 1e-4
    clip, capped, *_ = errors["metrics"]
    assert 0 < clip < 1
    assert 0 < capped < 1


def check_training(errors: dict[str, Any]) -> None:
    """Three steps, with gradients and weights that may be communicated during computation."""
    assert errors["weights"] < 2e-5
    assert errors["losses"] < 1e-5
    assert errors["norms"] < 1e-4


def check_grouped(errors: dict[str, Any]) -> None:
    """Experts multiplied all at once."""
    assert errors["gradients"] < 1e-6
    assert errors["norm"] < 1e-6


def check_guard(errors: dict[str, Any]) -> None:
    """Invalid data stop every rank."""
    loss, gradient, future, refused = errors["messages"]
    assert refused == [True, False, True]
    assert "later version than the trainer's" in future
    assert loss.startswith("the loss is nan")
    assert gradient.startswith("the gradient norm is nan")
    assert errors["unchanged"]


def check_half(errors: dict[str, Any]) -> None:
    assert errors["plain"] < 0.05
    assert errors["distributed"] == pytest.approx(errors["plain"], abs=0.01)


def check_credited(errors: dict[str, Any]) -> None:
    assert errors["gradients"] < 1e-4
    assert errors["loss"] < 1e-5
    assert errors["apart"] > 0.01


def check_rejected(errors: dict[str, Any]) -> None:
    """Rejected tokens leave the denominator."""
    assert errors["gradients"] < 1e-5
    assert errors["loss"] < 1e-6
    assert 0.2 < errors["share"] < 0.8
    assert errors["nothing"] == [False, 0.0, 0.0, 1.0]
    assert errors["unchanged"]


def check_balanced(errors: dict[str, Any]) -> None:
    assert errors["biases"] < 1e-7


CHECKS = {
    **dict.fromkeys(("packed", "single", "recompute"), check_parity),
    **dict.fromkeys(("plain", "distributed", "overlapped"), check_training),
    **{"grouped": check_grouped, "guard": check_guard, "bfloat16": check_half},
    **{"credited": check_credited, "rejected": check_rejected, "balanced": check_balanced},
}

STORED = {1: "tp=1", 2: "tp=2", 4: "pp=2,ep=2"}
"""Layouts by ranks."""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough)])
def test_float32_weights_among_others_are_kept(references: Path, thorough: bool, ranks: int) -> None:
    """Loaded, moved by a step, saved, exported, and sent to an engine, bit by bit."""
    layout = STORED[ranks]
    tried = sorted(FAMILIES.intersection(case.variants(case.settings_of(layout)))) if thorough else ["glm"]
    for variant, found in launch.run("stored", ranks, references, str(references), f"{layout}:{'+'.join(tried)}").items():
        for what in ("loaded", "resumed", "exported", "engine"):
            assert found[what] == [], (variant, what)
        assert found["biases_wide"]
        assert found["moved"] == (found["biases"] > 0) == ("n_routed_experts" in case.VARIANTS[variant])
