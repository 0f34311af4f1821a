"""A trainer that sleeps between its steps has the same bits, and gives its memory back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import case, launch

pytestmark = pytest.mark.ranks
CASES = ("dense:tp=2", "plain:ep=2,dtype=bfloat16", "plain:tp=2,dtype=bfloat16,lora=1", "dense:tp=2,sleep=optimizer+gradients")
LARGE = {"hidden_size": 256, "intermediate_size": 2048, "moe_intermediate_size": 512}


def test_sleep_changes_no_bit_and_frees_memory(tmp_path: Path) -> None:
    for variant in ("dense", "plain"):
        config = case.hf_config(variant)
        config.update(LARGE)
        config.save_pretrained(tmp_path / variant)
    for one in launch.run("sleep", 2, tmp_path, str(tmp_path), *CASES):
        for name, found in one.items():
            assert found["equal"], name
            assert str(tmp_path) in found["full"]
            for held, before, _, asleep, *_ in found["sleeps"]:
                assert before - asleep >= 0.95 * held, name
            taken = [again for *_, again in found["sleeps"][:4]]  # between two steps
            assert max(taken) - min(taken) < 0.01 * found["sleeps"][0][0], name
