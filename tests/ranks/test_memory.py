"""Planned memory equals Megatron's use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import families
from tests.ranks import launch

pytestmark = pytest.mark.ranks

SPREAD = {
    2: ("tp=2,dtype=bfloat16", "pp=2,dtype=bfloat16,lora=true", "ep=2,dtype=bfloat16,distributed=true"),
    4: (
        "tp=2,pp=2,dtype=bfloat16",
        "tp=2,ep=4,dtype=bfloat16,distributed=true,lora=true",
        "tp=2,ep=2,etp=2,dtype=float32,distributed=true",
    ),
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_weights_gradients_and_optimizer_of_every_rank(ranks: int, tmp_path: Path) -> None:
    """To the byte. State that is shared out is cut at whole blocks, so that one rank may have a few elements more than another. What
    sleeps includes the buffers of modules and their padding."""
    found: dict[str, list[dict[str, Any]]] = launch.run("memory", ranks, tmp_path, *SPREAD[ranks])
    for layout, every in found.items():
        for rank, one in enumerate(every):
            for name, nbytes in one["said"].items():
                blocks = 0.01 * nbytes if name == "optimizer" and "distributed" in layout else 0
                assert one["held"][name] == pytest.approx(nbytes, abs=blocks), f"{layout}, rank {rank}: {name}"
            assert one["asleep"][0] == pytest.approx(one["asleep"][1], rel=1e-3), f"{layout}, rank {rank}"
        held, said = (sum(one[which]["optimizer"] for one in every) for which in ("held", "said"))
        assert held == pytest.approx(said, rel=1e-3), layout


def test_what_is_kept_for_the_backward_pass(tmp_path: Path, thorough: bool) -> None:
    """To a hundredth; a recomputed layer is also given the rotary angles, and layers whose weights are frozen keep less than is said.
    Without --thorough of the families only deepseek, which has the most of its own, and of what can be recomputed one part of it."""
    plain, again, *adapted = (
        "dtype=float32",
        "dtype=float32,recompute=full",
        "dtype=float32,lora=true",
        "dtype=float32,lora=true,model=deepseek",
    )
    others = [f"{plain},model={name}" for name in families.MODELS if (name != "qwen3_moe" if thorough else name == "deepseek")]
    half = "dtype=bfloat16,model=glm"  # whose routers are sent in float32
    selective = f"{plain},recompute=selective,recompute_modules="
    parts = [selective + modules for modules in (("core_attn", "mlp", "moe") if thorough else ("core_attn",))]
    parts += [f"{selective}{modules},model=deepseek" for modules in (("mla_up_proj", "shared_experts") if thorough else ("mla_up_proj",))]
    layouts = (plain, again, *adapted, *others, half, *parts)
    found = {layout: one for layout, (one,) in launch.run("memory", 1, tmp_path, *layouts).items()}
    for layout in (*others, *adapted, half):
        assert found[layout]["held"] == found[layout]["said"], layout
    for layout in (*others, *parts):
        assert found[layout]["kept"] == pytest.approx(found[layout]["foreseen"], rel=0.01), layout
    assert found[plain]["kept"] == pytest.approx(found[plain]["foreseen"], rel=0.01)
    assert found[again]["kept"] - found[again]["angles"] == found[again]["foreseen"]
    for layout in adapted:
        assert 0.8 * found[layout]["foreseen"] < found[layout]["kept"] < found[layout]["foreseen"], layout
