"""The measurement itself, on a small model: all ways bring the same bytes, and the numbers are there and consistent."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from asyncmoe.models import family_of
from asyncmoe.reshard import plan
from benchmarks import reshard
from benchmarks.copies import copy_rates
from benchmarks.others import obstacles

SMALL = {**reshard.MODEL, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1024, "hidden_size": 256}


@pytest.mark.thorough
def test_a_case_has_what_it_promises() -> None:
    """Six processes that each import torch. Plans, exchanges and copies have shorter tests, here and in test_reshard_*.py."""
    found = reshard.case(SMALL, "pp2xep2 -> tp2ep2", 2)
    assert [one["transport"] for one in found] == ["shm", "gloo"]
    for one in found:
        assert 1 <= one["bytes_wire"] / one["bytes_lower_bound"] < 1.0005
        assert 0 < one["buffer_bytes"] <= 2 * reshard.BUCKET_BYTES
        assert one["peak_extra_bytes"] >= one["buffer_bytes"] // 2  # the buffers are touched, all but their tails
        seconds = one["seconds"]
        assert set(seconds) == {"plan", "prepare", "pack", "wire", "unpack", "verify", "commit", "total"}
        assert 0 < seconds["pack"] < seconds["total"]
        assert set(one["speedup"]) == set(one["baseline_seconds"]) == set(reshard.BASELINES)
        assert min(one["speedup"].values()) > 0


def test_copy_rates_are_rates() -> None:
    source, destination = reshard.layouts(SMALL, *reshard.CASES["tp2xep2 -> tp2"])
    made = plan(family_of(SMALL).tensors(SMALL), source, destination)
    rates = copy_rates(made, 0, destination[0].rank, reshard.BUCKET_BYTES, 2)
    ways = {way + kind for way in ("pack", "unpack") for kind in ("", "_same", "_fresh", "_share_same", "_share_fresh")}
    assert set(rates) == {"threads", *ways}
    assert min(rates.values()) > 0


def test_growth_is_what_was_touched_at_the_highest() -> None:
    """In a process of its own: what other tests left in this one may be given back at any moment."""
    work = (
        "from benchmarks.memory import Growth\n"
        "growth = Growth()\n"
        "array = bytearray(b'1') * (48 << 20)\n"
        "del array\n"
        "print(growth.peak_bytes(), Growth().peak_bytes())"
    )
    said = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=60, check=True).stdout
    touched, after = map(int, said.split())
    assert 47 << 20 < touched < 80 << 20
    assert after < 16 << 20


def test_systems_that_cannot_run_say_why() -> None:
    found = obstacles()
    assert set(found) == {"awex", "megatron_core"}
    if not torch.cuda.is_available():
        assert "refuses a machine without CUDA" in found["megatron_core"] or "no megatron.core" in found["megatron_core"]
    assert "_VALID_COMM_BACKENDS" in found["awex"]
