"""The measurement itself, on a small model: all ways bring the same bytes, and the numbers are there and consistent."""

from __future__ import annotations

from asyncmoe.bench import reshard

SMALL = {**reshard.MODEL, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1024, "hidden_size": 256}


def test_a_case_has_what_it_promises() -> None:
    found = reshard.case(SMALL, "pp2xep2 -> tp2ep2", 1)
    assert [one["transport"] for one in found] == ["shm", "gloo"]
    for one in found:
        assert 1 <= one["bytes_wire"] / one["bytes_lower_bound"] < 1.0005
        assert one["peak_extra_bytes"] <= 2 * reshard.BUCKET_BYTES
        seconds = one["seconds"]
        assert set(seconds) == {"plan", "prepare", "pack", "wire", "unpack", "verify", "commit", "total"}
        assert 0 < seconds["pack"] < seconds["total"]
        for way in ("per_tensor", "flattened_bucket"):
            assert one["speedup"][way] == one["baseline_seconds"][way] / seconds["total"]


def test_copy_rates_are_rates() -> None:
    rates = reshard.copy_rates(SMALL, 2)
    assert set(rates) == {"threads", "memcpy_out", "memcpy_in", "pack", "unpack", "pack_share", "unpack_share"}
    assert min(rates.values()) > 0
