"""Two jobs that train the same batches with several threads a rank have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import case, launch

pytestmark = pytest.mark.ranks
CASES = {
    "plain:ep=2": True,
    "plain:pp=2": False,
    "plain:cp=2,lora=1": False,
    "plain:tp=2,dtype=bfloat16,lora=1": False,
    "dense:tp=2": False,
    "dense:pp=2,dtype=bfloat16,lora=1": False,
    "dense:cp=2,dtype=bfloat16": False,
    "deepseek:tp=2,dtype=bfloat16": False,
    "deepseek:pp=2,lora=1": False,
    "deepseek:cp=2": False,
    "deepseek:ep=2,lora=1": False,
}
"""Pairwise; whether a case is tried in every run of the tests."""


@pytest.mark.parametrize("one", [pytest.param(name, marks=() if often else pytest.mark.thorough) for name, often in CASES.items()])
def test_two_jobs_compute_the_same_bits(tmp_path: Path, one: str) -> None:
    variant = one.partition(":")[0]
    case.hf_config(variant).save_pretrained(tmp_path / variant)
    first, second = (launch.run("deterministic", 2, tmp_path, str(tmp_path), one) for _ in range(2))
    for figures, state, looked_up in (rank[one] for rank in first):
        assert (len(figures), len(set(looked_up))) == (4, 1)
        assert len(state) > len(figures)
    assert first == second
