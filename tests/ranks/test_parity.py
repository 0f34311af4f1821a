"""Every layout computes what Hugging Face's model and autograd compute on one process."""

from __future__ import annotations

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
EVERYWHERE = ("packed", "single", "recompute", "plain", "distributed", "guard", "rejected", "credited", "bfloat16")
"""Checks of the plain variant in a thorough test ..."""
SWITCHED = dict.fromkeys(("ep2", "pp2xvpp2", "tp2xep2xetp2"), ("overlapped", "grouped"))
"""... with these in some layouts."""
CHECKS = {
    "1": ("packed", "single", "plain", "distributed", "guard", "rejected", "credited", "bfloat16"),
    "tp2": ("packed", "recompute", "plain", "bfloat16"),
    "pp2": ("packed", "plain", "guard"),
    "pp2xvpp2": ("packed", "recompute", "distributed", "overlapped", "grouped"),
    "ep2": ("packed", "single", "distributed", "overlapped", "grouped", "guard", "rejected", "credited"),
    "cp2xep2": ("packed", "plain", "rejected", "credited"),
    "tp2xep2xetp2": ("packed", "distributed"),
    "pp2xep2": ("packed", "distributed"),
    "cp2xtp2xep2": ("packed", "distributed"),
}
"""Otherwise: each way of splitting a model with packed rows and an optimizer, and each other check where it meets what others compute: all
tokens on other ranks (guard, rejected, credited), other stages (recompute), other shards (bfloat16)."""


def checks(layout: str, thorough: bool) -> tuple[str, ...]:
    return (*EVERYWHERE, *SWITCHED.get(layout, ())) if thorough else CHECKS.get(layout, ())


def where(*names: str) -> pytest.MarkDecorator:
    """A test of these checks, by the name of each and of a layout."""
    every = [(check, layout) for layout in LAYOUTS for check in names if check in checks(layout, thorough=True)]
    marked = [pytest.param(check, layout, marks=() if check in CHECKS.get(layout, ()) else pytest.mark.thorough) for check, layout in every]
    return pytest.mark.parametrize(("how", "layout"), marked)


FAMILIES = {variant for variant, model in case.VARIANTS.items() if model["model_type"] not in ("qwen3", "qwen3_moe")}
VARIED = {
    ("pp2", "tied"),
    ("1", "dense"),
    ("tp2", "dense-tied"),
    ("cp2xep2", "deepseek"),
} | {("1", variant) for variant in FAMILIES - {"llama-tied", "glm-air"}}
"""Variants of the model in every layout in which they are something else; in all others only in a thorough test."""


def variants(layout: str) -> list[str]:
    return case.variants(case.sizes_of(LAYOUTS[layout][1]))


def varied() -> list[Any]:
    every = [(layout, variant) for layout in LAYOUTS for variant in variants(layout) if variant != "plain"]
    return [pytest.param(*one, marks=() if one in VARIED else pytest.mark.thorough) for one in every]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> Path:
    path = tmp_path_factory.mktemp("parity")
    for variant in case.VARIANTS if thorough else ["plain", *sorted({variant for _, variant in VARIED})]:
        oracle.write(path / variant, variant)
    return path


class Worlds:
    """Results by layout, filled as tests ask for them: one launch a world size, with all of its layouts.

    A thorough test has so many variants that each layout gets a launch of its own: groups over which a model has trained keep their
    threads, and at hundreds of groups the threads take all the time.
    """

    def __init__(self, references: Path, thorough: bool) -> None:
        self._references, self._thorough = references, thorough
        self._found: dict[str, Any] = {}

    def of(self, layout: str) -> Any:
        """What a layout made of the variants of the model."""
        if layout not in self._found:
            ranks = LAYOUTS[layout][0]
            together = [name for name, (count, _) in LAYOUTS.items() if count == ranks and name in CHECKS]
            names = [layout] if self._thorough else together
            wanted = [f"{LAYOUTS[name][1]}:{'+'.join(self._tried(name))}" for name in names]
            limit_s = 900.0 if self._thorough else 600.0
            found = launch.run("parity", ranks, self._references, str(self._references), *wanted, timeout_s=limit_s)
            self._found |= {name: found[LAYOUTS[name][1]] for name in names}
        return self._found[layout]

    def _tried(self, layout: str) -> list[str]:
        """Variants of the model, the plain one with its checks."""
        plain = "/".join(("plain", *checks(layout, self._thorough)))
        others = [name for name in variants(layout) if name != "plain" and (self._thorough or (layout, name) in VARIED)]
        return [plain, *others]


@pytest.fixture(scope="session")
def worlds(references: Path, thorough: bool) -> Worlds:
    return Worlds(references, thorough)


@pytest.fixture
def found(layout: str, worlds: Worlds) -> dict[str, dict[str, Any]]:
    """What a layout made of the plain variant, by check."""
    result: dict[str, dict[str, Any]] = worlds.of(layout)["plain"]
    return result


@where("packed", "single", "recompute")
def test_logits_and_gradients(found: dict[str, dict[str, Any]], how: str) -> None:
    check_parity(found[how])


def check_parity(errors: dict[str, Any]) -> None:
    assert errors["logits"] < 1e-4
    assert errors["logprobs"] < 1e-4
    assert errors["sampled_only"] < 1e-6
    for loss in ("supervised", "policy"):
        assert errors[f"{loss}_loss"] < 1e-5
        assert errors[f"{loss}_norm"] < 1e-4
        assert errors[f"{loss}_gradients"] < 1e-4
    assert errors["unchanged"]  # a learning rate of 0


@where("packed", "single")
def test_trainer_and_engine_agree_on_the_same_version(found: dict[str, dict[str, Any]], how: str) -> None:
    assert 0 <= found[how]["same_version"] < 1e-4


@where("packed", "single")
def test_metrics_do_not_depend_on_the_layout(found: dict[str, dict[str, Any]], how: str, worlds: Worlds) -> None:
    alone = worlds.of("1")["plain"]["single"]
    clip, capped, *_ = alone["metrics"]
    assert 0 < clip < 1
    assert 0 < capped < 1
    assert found[how]["metrics"] == pytest.approx(alone["metrics"], abs=2e-5)
    assert found[how]["counts"] == alone["counts"]


@where("plain", "distributed")
def test_weights_after_three_steps(found: dict[str, dict[str, Any]], how: str) -> None:
    check_training(found[how])


@where("overlapped")
def test_gradients_and_weights_that_travel_while_others_are_computed(found: dict[str, dict[str, Any]], how: str) -> None:
    check_training(found[how])


@where("grouped")
def test_experts_multiplied_all_at_once(found: dict[str, dict[str, Any]], how: str) -> None:
    assert found[how]["gradients"] < 1e-6
    assert found[how]["norm"] < 1e-6


@pytest.mark.parametrize(("layout", "variant"), varied())
def test_variants_of_the_model(layout: str, variant: str, worlds: Worlds) -> None:
    found = worlds.of(layout)[variant]
    gradients = max(found["packed"][f"{loss}_gradients"] for loss in ("supervised", "policy"))
    print(f"{variant} {layout}: logits {found['packed']['logits']:.1e}, gradients {gradients:.1e}, weights {found['plain']['weights']:.1e}")
    check_parity(found["packed"])
    check_training(found["plain"])
    if "balanced" in found:
        assert found["balanced"]["biases"] < 1e-7


STORED = {1: "tp=1", 2: "tp=2", 4: "pp=2,ep=2"}
"""Layouts by ranks."""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.thorough)])
def test_float32_weights_among_others_are_kept(references: Path, thorough: bool, ranks: int) -> None:
    """Loaded, moved by a step, saved, exported, and sent to an engine, bit by bit."""
    layout = STORED[ranks]
    tried = sorted(FAMILIES.intersection(case.variants(case.sizes_of(layout)))) if thorough else ["glm"]
    for variant, found in launch.run("stored", ranks, references, str(references), f"{layout}:{'+'.join(tried)}").items():
        for what in ("loaded", "resumed", "exported", "engine"):
            assert found[what] == [], (variant, what)
        assert found["biases_wide"]
        assert found["moved"] == (found["biases"] > 0) == ("n_routed_experts" in case.VARIANTS[variant])


def check_training(errors: dict[str, Any]) -> None:
    assert errors["weights"] < 2e-5
    assert errors["losses"] < 1e-5
    assert errors["norms"] < 1e-4


@where("guard")
def test_what_must_not_be_trained_on_stops_every_rank(found: dict[str, dict[str, Any]], how: str) -> None:
    loss, gradient, future, refused = found[how]["messages"]
    assert refused == [True, False, True]
    assert "later version than the trainer's" in future
    assert loss.startswith("the loss is nan")
    assert gradient.startswith("the gradient norm is nan")
    assert found[how]["unchanged"]


@where("bfloat16")
def test_bfloat16_follows_float32(found: dict[str, dict[str, Any]], how: str) -> None:
    assert found[how]["plain"] < 0.05
    assert found[how]["distributed"] == pytest.approx(found[how]["plain"], abs=0.01)


@pytest.mark.parametrize("layout", ["ep2", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("dp2", "pp2xep2"))])
def test_filler_was_part_of_it(found: dict[str, dict[str, Any]]) -> None:
    """Seven trajectories one by one on two data-parallel ranks."""
    assert found["single"]["filler"] == 1


@where("credited")
def test_steps_and_a_teacher_are_credited_token_by_token(found: dict[str, dict[str, Any]], how: str) -> None:
    errors = found[how]
    assert errors["gradients"] < 1e-4
    assert errors["loss"] < 1e-5
    assert errors["apart"] > 0.01


@where("rejected")
def test_rejected_tokens_leave_the_denominator(found: dict[str, dict[str, Any]], how: str) -> None:
    errors = found[how]
    assert errors["gradients"] < 1e-5
    assert errors["loss"] < 1e-6
    assert 0.2 < errors["share"] < 0.8
    assert errors["nothing"] == [False, 0.0, 0.0, 1.0]
    assert errors["unchanged"]
