"""Digests of a trainer's state are those of its whole tensors, under any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import launch, lora_oracle, oracle

pytestmark = pytest.mark.ranks

DENSE, MIXED, LATENT = "model=dense-tied", "dtype=bfloat16", "model=deepseek"
LOADED = {
    f"ranks=1,{DENSE}": [f"ranks=2,tp=2,distributed=1,{DENSE}", f"ranks=2,pp=2,vpp=2,{DENSE}", f"ranks=2,cp=2,distributed=1,{DENSE}"],
    f"ranks=2,tp=2,ep=2,distributed=1,{MIXED}": [f"ranks=1,{MIXED}", f"ranks=2,pp=2,distributed=1,{MIXED}", f"ranks=2,ep=2,{MIXED}"],
    f"ranks=2,tp=2,{LATENT}": [
        *(f"ranks=1,{LATENT}", f"ranks=2,pp=2,distributed=1,{LATENT}"),
        *(f"ranks=2,ep=2,{LATENT}", f"ranks=2,ep=2,distributed=1,{LATENT}"),
    ],
    "ranks=1,lora=per-expert,distributed=1": ["ranks=2,tp=2,lora=per-expert", "ranks=2,pp=2,ep=1,lora=per-expert,distributed=1"],
}
"""By what was saved, what it is loaded in."""
JOBS = [f"{saved} > {loaded}" for saved, others in LOADED.items() for loaded in others]
SAME = [
    (f"ranks=2,tp=2,{LATENT} > ranks=1,{LATENT}", f"ranks=2,tp=2,{LATENT} > ranks=2,pp=2,distributed=1,{LATENT}"),
    (f"ranks=2,tp=2,{LATENT} > ranks=2,ep=2,{LATENT}", f"ranks=2,tp=2,{LATENT} > ranks=2,ep=2,distributed=1,{LATENT}"),
]
"""Layouts that add the same numbers in the same order, and so have the same gradients."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("digests")
    for variant in ("dense-tied", "plain", "deepseek"):
        oracle.write(path / variant, variant, trained=False)
    lora_oracle.write(path / "plain", "per-expert")
    results: dict[str, dict[str, Any]] = {}
    for stage in (list(LOADED), JOBS):
        for ranks in (1, 2):
            here = [job for job in stage if f"ranks={ranks}" in job.rpartition(" > ")[2]]
            results |= launch.run("digests", ranks, path, str(path), *here)
    return results


@pytest.mark.parametrize("job", [*LOADED, *JOBS])
def test_digests_are_those_of_the_whole_tensors(found: dict[str, dict[str, Any]], job: str) -> None:
    one, saved = found[job], found[job.partition(" > ")[0]]
    assert (one["unnamed"], one["weights"], one["optimizer"], one["equal"]) == ([], [], [], [])
    assert one["tensors"] == saved["tensors"]
    assert len(one["scaled"]) == 1
    assert one["scaled"] == saved["scaled"]


@pytest.mark.parametrize("job", [job for job in (*LOADED, *JOBS) if MIXED not in job])
def test_one_changed_element_is_found(found: dict[str, dict[str, Any]], job: str) -> None:
    assert len(found[job]["poked"]) == 2
    for one in found[job]["poked"]:
        assert one["changed"] == [one["name"]]
        assert one["seen"] == [[one["name"], 1, 0, 0, 1.0, 0.0]]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_gradients_have_equal_digests(found: dict[str, dict[str, Any]], one: str, other: str) -> None:
    assert found[one]["gradient"] == found[other]["gradient"]


def test_tensors_are_in_the_order_of_the_forward_pass(found: dict[str, dict[str, Any]]) -> None:
    names = found[f"ranks=2,tp=2,{LATENT}"]["tensors"]
    assert names[0] == "embedding.word_embeddings.weight"
    assert names[-2:] == ["decoder.final_layernorm.weight", "output_layer.weight"]
    second = [name.removeprefix("decoder.layers.1.") for name in names if ".layers.1." in name]
    at = second.index
    assert at("input_layernorm.weight") == 0
    assert at("self_attention.linear_kv_up_proj.weight") < at("self_attention.linear_proj.weight") < at("pre_mlp_layernorm.weight")
    assert at("mlp.router.weight") < at("mlp.experts.experts.linear_fc1.weight") < at("mlp.experts.experts.linear_fc2.weight")
