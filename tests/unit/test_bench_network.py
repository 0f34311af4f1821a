"""What `bench network --changed` changes and counts, without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmoe.errors import InvariantBroken, UserError
from asyncmoe.models import family_of
from asyncmoe.reshard import RankLayout
from benchmarks.network.cases import Case, Traffic, layouts, nbytes, planned, sized, traffic
from benchmarks.network.changes import change, percents
from benchmarks.network.delta_summary import summary, table
from benchmarks.network.hosts import Wire
from benchmarks.reshard import numbered

HF = {**sized(55, 2), "hidden_size": 128, "vocab_size": 512, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHAPES = family_of(HF).tensors(HF)
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())
WIRE = Wire(rate=1_000_000_000)


def whole(made: list[RankLayout], arrays: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The canonical tensors that ranks hold together; what several of them hold must agree."""
    found = {name: np.zeros(shape, np.uint16) for name, shape in SHAPES.items()}
    there = {name: np.zeros(shape, bool) for name, shape in SHAPES.items()}
    for layout, held in zip(made, arrays, strict=True):
        for piece in layout.pieces:
            box = tuple(slice(s, s + n) for s, n in zip(piece.box.start, piece.box.extent, strict=True))
            begin = held[piece.storage].reshape(-1)[piece.offset :]
            values = np.lib.stride_tricks.as_strided(begin, piece.box.extent, [2 * stride for stride in piece.strides])
            seen = there[piece.tensor][box]
            assert (found[piece.tensor][box][seen] == values[seen]).all(), f"ranks differ in {piece.tensor}"
            found[piece.tensor][box], there[piece.tensor][box] = values, True
    assert all(place.all() for place in there.values())
    return found


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([(1, 1, 1), (4, 1, 2), (2, 2, 1), (4, 2, 2)]), st.floats(0.2, 30.0), st.integers(1, 1 << 40))
def test_every_rank_changes_the_same_elements(hosts: tuple[int, int, int], percent: float, version: int) -> None:
    case = Case(HF, *hosts)
    sides = []
    for side in layouts(case):
        arrays = [numbered(layout) for layout in side]
        before = whole(side, arrays)
        for layout, held in zip(side, arrays, strict=True):
            change(layout, SHAPES, held, version, percent)
        sides.append(whole(side, arrays))
    changed = sum(int((after != before[name]).sum()) for name, after in sides[0].items())
    assert all((sides[1][name] == after).all() for name, after in sides[0].items())
    expected = ELEMENTS * percent / 100
    assert abs(changed - expected) < 6 * np.sqrt(expected), "the share that was asked for"


def test_versions_change_different_elements_and_leave_padding() -> None:
    layout = layouts(Case(HF, 1, 1, 1))[0][0]
    first, second = numbered(layout), numbered(layout)
    counts = [change(layout, SHAPES, arrays, version, 1.0) for version, arrays in enumerate((first, second))]
    before = numbered(layout)
    both = sum(int(((first[name] != was) & (second[name] != was)).sum()) for name, was in before.items())
    assert min(counts) > 0.009 * ELEMENTS
    assert both < 0.05 * min(counts), "nearly all are others"
    held = {piece.storage for piece in layout.pieces}
    assert all((first[name] == before[name]).all() for name in before if name not in held)


def test_percents_are_read() -> None:
    assert percents("") == ()
    assert percents(" 0.3,1, 10 ") == (0.3, 1.0, 10.0)
    for wrong in ("much", "0", "-1", "31", "1,,3", "1,1.0", "nan", "inf"):
        with pytest.raises(UserError, match="--changed"):
            percents(wrong)


def test_sizes_are_those_asked_for() -> None:
    assert [round(nbytes(sized(megabytes, 1)) / 1e6) for megabytes in (41, 400, 4000)] == [41, 399, 3998]


CASE = Case(HF, trainers=1, engines=2, tp=1)
CODED, FRAMES = 60_000, 5_000


def ranks(**wrong: Any) -> list[dict[str, Any]]:
    """What three ranks would say of two pairs."""
    dense = traffic(planned(CASE), CASE.world)

    def turn(rank: int, moved: tuple[int, int], seconds: float, **more: Any) -> dict[str, Any]:
        sent, received = (count + FRAMES for count in moved)
        spent = {"seconds": seconds, "sent": sent, "received": received, "retransmitted": 0, "cpu_s": 0.1}
        return {**spent, "right": True, "phases": {}, **(more if rank else {}), **(wrong if rank == 2 else {})}

    found = []
    for rank in range(3):
        coded = (2 * CODED, 0) if rank == 0 else (0, CODED)
        phases = {"encode": 0.1, "coded": {"1": CODED, "2": CODED}, "changed": 10, "elements": 1000} if rank == 0 else {"prove": 0.2}
        pairs = []
        for slower in (1, 2):
            full = turn(rank, (dense.sent[rank], dense.received[rank]), 4.0 * slower, commit_s=0.001, copy_s=0.5)
            delta = {**turn(rank, coded, 1.0 * slower, commit_s=0.02), "phases": phases, "peak_extra_bytes": 1000 + rank}
            pairs.append({"dense": full, "delta": delta})
        found.append({"full": {"seconds": 5.0, "peak_extra_bytes": 10_000}, "pairs": {"1": pairs}, "right": True})
    return found


def dense() -> Traffic:
    return traffic(planned(CASE), CASE.world)


def test_pairs_are_put_together() -> None:
    found = summary(CASE, ranks(), dense(), WIRE)
    one = found["percents"][0]
    assert (one["percent"], one["changed"]) == (1.0, 0.01)
    assert one["ratio"]["seconds"] == 4.0
    assert one["ratio"]["bytes"] == pytest.approx((2 * nbytes(HF) + 3 * FRAMES) / (2 * CODED + 3 * FRAMES), rel=0.01)
    assert one["delta"]["planned_bytes"] == 2 * CODED
    assert one["delta"]["over_plan"] == pytest.approx(1 + FRAMES / CODED)
    assert one["delta"]["phases"] == {"encode": 0.1, "prove": 0.2}
    assert (one["dense"]["commit_s"], one["dense"]["copy_s"], one["delta"]["commit_s"]) == (0.001, 0.5, 0.02)
    assert one["delta"]["peak_extra_bytes"] == 1002, "of the engine host where it is most"
    assert one["delta"]["trainer_extra_bytes"] == 11_000, "with what was published last"
    assert found["full"]["peak_extra_share"] == pytest.approx(10_000 / nbytes(HF), rel=0.01)
    assert "4.0x" in table({"cases": [{"name": "1+2x1", "bytes": nbytes(HF), "deltas": found}]})[1]
    assert table({"cases": [{"name": "1+2x1"}]}) == []


@pytest.mark.parametrize("wrong", [{"right": False}, {"sent": 9_000_000}, {"received": CODED - 1}])
def test_other_weights_or_bytes_are_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvariantBroken, match="host 2"):
        summary(CASE, ranks(**wrong), dense(), WIRE)


def test_other_weights_in_the_end_are_an_error() -> None:
    found = ranks()
    found[1]["right"] = False
    with pytest.raises(InvariantBroken, match="host 1 holds other weights after its deltas"):
        summary(CASE, found, dense(), WIRE)
