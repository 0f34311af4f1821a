"""The output layer in blocks, of two tensor-parallel ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import launch

pytestmark = pytest.mark.ranks


def test_ranks_that_share_a_vocabulary_compute_what_one_does(tmp_path: Path) -> None:
    """In float32 to its rounding. In bfloat16 Megatron rounds a row's gradient of its logits once more."""
    for rank in launch.run("head", 2, tmp_path):
        assert max(rank["slices"].values()) < 4e-6, rank["slices"]
        for name, found in rank["model"].items():
            assert found.pop("head is trained") == (name != "adapters")
            for rows, errors in found.items():
                half = "bfloat16" in name
                assert errors["logprobs"] < 1e-5, (name, rows)
                assert errors["gradients"] < (0.03 if half else 4e-6), (name, rows, errors)
