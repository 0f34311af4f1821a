"""Two jobs that train the same batches with several threads a rank have the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import case, launch

pytestmark = pytest.mark.ranks
OFTEN = "plain:ep=2"
SELDOM = """
plain:pp=2 plain:cp=2,lora=1 plain:tp=2,dtype=bfloat16,lora=1 dense:tp=2 dense:pp=2,dtype=bfloat16,lora=1 dense:cp=2,dtype=bfloat16
deepseek:tp=2,dtype=bfloat16 deepseek:pp=2,lora=1 deepseek:cp=2 deepseek:ep=2,lora=1
"""
"""With it, every pair of a model, a layout, a dtype, and whole weights or adapters."""


@pytest.mark.parametrize("one", [OFTEN, *(pytest.param(each, marks=pytest.mark.thorough) for each in SELDOM.split())])
def test_two_jobs_compute_the_same_bits(tmp_path: Path, one: str) -> None:
    variant = one.partition(":")[0]
    case.hf_config(variant).save_pretrained(tmp_path / variant)
    first, second = (launch.run("deterministic", 2, tmp_path, str(tmp_path), one) for _ in range(2))
    for figures, state, looked_up in (rank[one] for rank in first):
        assert (len(figures), len(set(looked_up))) == (4, 1)
        assert len(state) > len(figures)
    assert first == second
