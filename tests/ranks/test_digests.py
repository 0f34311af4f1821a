"""Digests of a trainer's state are those of its whole tensors, under any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import launch, lora_oracle, oracle

pytestmark = pytest.mark.ranks

DENSE, MIXED, LATENT, LORA = "model=dense-tied", "dtype=bfloat16", "model=deepseek", "lora=per-expert"
LAYOUTS = {
    f"ranks=1,{DENSE}": ["ranks=2,tp=2,distributed=1", "ranks=2,pp=2,vpp=2", "ranks=2,cp=2,distributed=1"],
    f"ranks=2,tp=2,ep=2,distributed=1,{MIXED}": ["ranks=1", "ranks=2,pp=2,distributed=1", "ranks=2,ep=2"],
    f"ranks=2,tp=2,{LATENT}": ["ranks=1", "ranks=2,pp=2,distributed=1", "ranks=2,ep=2", "ranks=2,ep=2,distributed=1"],
    f"ranks=1,distributed=1,{LORA}": ["ranks=2,tp=2", "ranks=2,pp=2,distributed=1"],
}
"""By what was saved, what it is loaded in, without the model."""
LOADED = [f"{saved} > {layout},{saved.rpartition(',')[2]}" for saved, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("digests")
    for variant in ("dense-tied", "plain", "deepseek"):
        oracle.write(path / variant, variant, trained=False)
    lora_oracle.write(path / "plain", "per-expert")
    results: dict[str, dict[str, Any]] = {}
    for stage in (LAYOUTS, LOADED):
        for ranks in (1, 2):
            here = [job for job in stage if f"ranks={ranks}" in job.rpartition(" > ")[2]]
            results |= launch.run("digests", ranks, path, str(path), *here)
    return results


@pytest.mark.parametrize("job", [*LAYOUTS, *LOADED])
def test_digests_are_those_of_the_whole_tensors(found: dict[str, dict[str, Any]], job: str) -> None:
    one, saved = found[job], found[job.partition(" > ")[0]]
    assert (one["weights"], one["optimizer"], one["equal"]) == ([], [], True)
    assert one["found"], "one changed element"
    assert (one["tensors"], one["scaled"], len(one["scaled"])) == (saved["tensors"], saved["scaled"], 1)


def test_layouts_that_add_the_same_numbers_have_the_same_gradients(found: dict[str, dict[str, Any]]) -> None:
    one, staged, plain, distributed = (found[job]["gradient"] for job in LOADED if LATENT in job)
    assert one == staged
    assert plain == distributed


def test_tensors_are_in_the_order_of_the_forward_pass(found: dict[str, dict[str, Any]]) -> None:
    names = found[f"ranks=2,tp=2,{LATENT}"]["tensors"]
    last = ["input_layernorm", "self_attention.linear_kv_up_proj", "self_attention.linear_proj", "pre_mlp_layernorm", "mlp.router"]
    last += ["mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2"]
    passed = ["embedding.word_embeddings", *(f"decoder.layers.3.{name}" for name in last), "decoder.final_layernorm", "output_layer"]
    places = [names.index(f"{name}.weight") for name in passed]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0, len(names) - 1)
