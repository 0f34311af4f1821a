"""A run resumes under any layout: on other ranks, with or without expert parallelism, with the optimizer's state sharded or not."""

from __future__ import annotations

import pytest

from tests.ranks import launch, lora_case, lora_oracle, oracle

pytestmark = pytest.mark.ranks

FOUR, TWO = "ranks=4,tp=2,ep=2", "ranks=2,tp=2,ep=2"
RESUMED = {
    f"{TWO},distributed=1": ["ranks=1,distributed=1", "ranks=4,ep=4,distributed=1"],
    "ranks=2,pp=2,vpp=2,distributed=1": ["ranks=2,ep=2"],
}
"""By what was saved, what it goes on in."""
THOROUGH = {
    TWO: ["ranks=2,pp=2", "ranks=2,cp=2", "ranks=4,tp=2,pp=2", "ranks=4,cp=2,ep=2"],
    f"{FOUR},distributed=1": ["ranks=2,pp=2,distributed=1", "ranks=4,tp=2,ep=2,etp=2,distributed=1", "ranks=4"],
    "ranks=2,pp=2,distributed=1": ["ranks=2,pp=2,first_stage_layers=3,distributed=1", "ranks=4,tp=2,cp=2,distributed=1"],
    "ranks=4,pp=2,vpp=2,ep=2": ["ranks=2,tp=2"],
    "ranks=2,ep=2,model=deepseek": ["ranks=2,pp=2,model=deepseek", "ranks=2,tp=2,model=deepseek"],
    "ranks=2,tp=2,model=tied": ["ranks=2,pp=2,model=tied", "ranks=4,pp=2,ep=2,model=tied"],
    f"{TWO},dtype=bfloat16,distributed=1": ["ranks=2,pp=2,dtype=bfloat16,distributed=1", "ranks=1,dtype=bfloat16"],
    "ranks=2,tp=2,lora=per-expert,distributed=1": ["ranks=1,lora=per-expert,distributed=1", "ranks=2,pp=2,vpp=2,lora=per-expert"],
    f"{FOUR},lora=shared-outer": ["ranks=4,ep=4,lora=shared-outer", "ranks=4,pp=2,ep=2,lora=shared-outer"],
}
JOBS = [f"{saved} > {loaded}" for saved, others in RESUMED.items() for loaded in others]
MORE = [f"{saved} > {loaded}" for saved, others in THOROUGH.items() for loaded in others]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> dict[str, dict[str, float]]:
    path = tmp_path_factory.mktemp("layouts")
    jobs = [*JOBS, *(MORE if thorough else ())]
    for variant in ("plain", "deepseek", "tied") if thorough else ("plain",):
        oracle.write(path / variant, variant, trained=False)
    for name in lora_case.BOTH if thorough else ():
        lora_oracle.write(path / "plain", name)
    saves = list(dict.fromkeys(job.partition(" > ")[0] for job in jobs))
    results: dict[str, dict[str, float]] = {}
    for stage in (saves, jobs):
        for ranks in (1, 2, 4):
            if here := [job for job in stage if f"ranks={ranks}" in job.rpartition(" > ")[2]]:
                results |= launch.run("any_layout", ranks, path, str(path), *here)
    return results


@pytest.mark.parametrize("job", [*JOBS, *(pytest.param(job, marks=pytest.mark.thorough) for job in MORE)])
def test_the_next_losses_and_weights_are_those_of_the_run_that_went_on(found: dict[str, dict[str, float]], job: str) -> None:
    narrow = "bfloat16" in job
    assert found[job]["losses"] < (5e-2 if narrow else 1e-6)
    assert found[job]["weights"] < (2e-2 if narrow else 2e-5)
