"""Sparse deltas over random layouts: several versions in a row against a dense exchange, and the canonical digest against plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from delta_ranks import Ranks, change
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_ranks import Arrays, blank, filled, numbered
from test_reshard_random import Shapes, cases

from asyncmoe.errors import InvariantBroken, LayoutError, TransferError
from asyncmoe.reshard import Box, LayoutBuilder, RankLayout, plan
from tests.unit.example_counts import examples

DENSITIES = (0.0, 1e-9, 0.001, 0.01, 0.5, 1.0)
"""Of changed elements; 1e-9 is a single one."""
Case = tuple[Shapes, list[RankLayout], list[RankLayout]]


def ranks_of(case: Case, values: Arrays, **how: int) -> Ranks:
    shapes, source, destination = case
    sources = {layout.rank: filled(layout, values) for layout in source}
    return Ranks(plan(shapes, source, destination), sources, {layout.rank: blank(layout) for layout in destination}, **how)


@given(cases(), st.integers(0, 1 << 32), st.lists(st.sampled_from(DENSITIES), min_size=1, max_size=4), st.sampled_from([8, 64, 1 << 20]))
@settings(max_examples=examples(120), deadline=None)
def test_versions_in_a_row_are_what_dense_updates_bring(case: Case, seed: int, densities: list[float], message_bytes: int) -> None:
    shapes, source, destination = case
    generator = np.random.default_rng(seed)
    values = numbered(shapes)
    ranks = ranks_of(case, values, message_bytes=message_bytes)
    ranks.full(1)
    ranks.check(shapes, destination, slow=True)
    for version, density in enumerate(densities, 2):
        for tensor in values.values():
            change(tensor, density, generator)
        for layout in source:
            for name, array in filled(layout, values).items():
                ranks.sources[layout.rank][name][...] = array
        ranks.encode(version)
        ranks.commit(version)
        ranks.check(shapes, destination, slow=True)


def matrix(rank: int, shape: tuple[int, ...], dtype: str = "bfloat16", name: str = "w") -> RankLayout:
    builder = LayoutBuilder(rank, dtype)
    builder.place("s", shape, [(name, Box((0,) * len(shape), shape), (0,) * len(shape))])
    return builder.build()


RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def large(dtype: str, item: int, rows: int = 700, columns: int = 1000) -> tuple[Ranks, Shapes, RankLayout]:
    """Rows of one rank to columns of another: many blocks of 128 KiB, runs of half a row."""
    shapes = {"w": (rows, columns)}
    builder = LayoutBuilder(1, dtype)
    half = columns // 2
    for i in range(2):
        builder.place(f"half{i}", (rows, half), [("w", Box((0, half * i), (rows, half)), (0, 0))])
    wanted = builder.build()
    generator = np.random.default_rng(item)
    source = {"s": generator.integers(0, 256, (rows, columns * item), np.uint8).view(RAW[item])}
    got = {name: np.zeros(s.shape, RAW[item]) for name, s in wanted.storages.items()}
    ranks = Ranks(plan(shapes, [matrix(0, (rows, columns), dtype)], [wanted]), {0: source}, {1: got}, message_bytes=1 << 19)
    return ranks, shapes, wanted


@pytest.mark.parametrize(("dtype", "item"), [("uint8", 1), ("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_every_density_of_every_item(dtype: str, item: int) -> None:
    ranks, shapes, wanted = large(dtype, item)
    generator = np.random.default_rng(1)
    ranks.full(1)
    for version, density in enumerate([*DENSITIES, 0.003, 0.1, 0.3, 0.9], 2):
        change(ranks.sources[0]["s"], density, generator)
        size = ranks.senders[0].encode(version)
        assert size is not None
        elements = 700 * 1000
        assert size.changed == min(elements, max(int(density > 0), round(density * elements)))
        assert size.nbytes <= size.dense_bytes + 8 * 400 + 100 * size.dense_bytes / (1 << 18)  # entries of blocks, frames
        assert (size.blocks > 0) == (density * (item + 1) >= item)
        ranks.commit(version)
        ranks.check(shapes, [wanted])


@pytest.mark.parametrize(("percent", "most"), [(0.3, 3.65), (1.0, 3.2), (3.0, 3.1)])
def test_bytes_of_a_changed_bfloat16(percent: float, most: float) -> None:
    """Positions, values, entries and frames together; the code's mean of gaps that are geometrically distributed is 1.51, 1.11 and 1.00."""
    ranks, _, _ = large("bfloat16", 2, 2000, 2000)
    ranks.full(1)
    change(ranks.sources[0]["s"], percent / 100, np.random.default_rng(2))
    size = ranks.senders[0].encode(2)
    assert size is not None
    assert 3.0 < size.nbytes / size.changed <= most


def test_what_changes_in_stretches_is_sent_whole_where_it_is_dense() -> None:
    ranks, shapes, wanted = large("bfloat16", 2)
    ranks.full(1)
    ranks.sources[0]["s"][:200] ^= 1
    size = ranks.senders[0].encode(2)
    assert size is not None
    assert size.blocks > 0
    assert size.nbytes < 0.45 * size.dense_bytes
    ranks.commit(2)
    ranks.check(shapes, [wanted])


# ---------------------------------------------------------------- what must not happen


def test_two_destinations_of_equal_layouts_share_base_and_messages() -> None:
    shape = (400, 300)
    values = np.random.default_rng(5).integers(0, 1 << 16, shape, np.uint16)
    made = plan({"w": shape}, [matrix(0, shape)], [matrix(r, shape) for r in (1, 2, 3)])
    ranks = Ranks(made, {0: {"s": values}}, {r: {"s": np.zeros(shape, np.uint16)} for r in (1, 2, 3)})
    assert ranks.senders[0].base_bytes == values.nbytes
    ranks.full(1)
    change(values, 0.01, np.random.default_rng(6))
    ranks.encode(2)
    assert ranks.senders[0].messages(1)[0] is ranks.senders[0].messages(3)[0]
    ranks.commit(2)
    ranks.check({"w": shape}, [matrix(r, shape) for r in (1, 2, 3)])


def test_an_abandoned_version_leaves_base_and_receivers_as_they_were() -> None:
    ranks, shapes, wanted = large("bfloat16", 2)
    ranks.full(1)
    before = ranks.sources[0]["s"].copy()
    change(ranks.sources[0]["s"], 0.5, np.random.default_rng(7))
    ranks.encode(2)
    ranks.stage(1)
    ranks.receivers[1].abandon()
    ranks.senders[0].abandon()
    assert ranks.receivers[1].staged_bytes == 0
    ranks.sources[0]["s"][...] = before
    size = ranks.senders[0].encode(3)
    assert size is not None
    assert size.changed == 0
    ranks.commit(3)
    ranks.check(shapes, [wanted])


def test_who_missed_a_version_is_refused_and_a_full_update_helps() -> None:
    ranks, shapes, wanted = large("bfloat16", 2)
    generator = np.random.default_rng(8)
    ranks.full(1)
    change(ranks.sources[0]["s"], 0.01, generator)
    ranks.encode(2)
    ranks.senders[0].commit()  # the receiver never saw it
    change(ranks.sources[0]["s"], 0.01, generator)
    ranks.encode(3)
    held = {name: array.copy() for name, array in ranks.destinations[1].items()}
    with pytest.raises(TransferError, match="got a change of version 2, expected one of 1"):
        ranks.stage(1)
    assert all((held[name] == array).all() for name, array in ranks.destinations[1].items())
    ranks.senders[0].abandon()
    ranks.full(4)
    ranks.check(shapes, [wanted])


@pytest.mark.parametrize("owned", [False, True])
def test_a_message_is_copied_unless_it_is_the_receivers_own(owned: bool) -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    change(ranks.sources[0]["s"], 0.01, np.random.default_rng(9))
    ranks.encode(2)
    message = ranks.senders[0].messages(1)[0].copy()
    ranks.receivers[1].stage(0, message, owned=owned)
    ((_, kept),) = ranks.receivers[1]._incoming[0].staged.values()
    assert np.shares_memory(kept, message) is owned


def test_another_base_of_the_same_number_is_refused() -> None:
    """A trainer that is replayed after a crash numbers its versions alike, and has other bits."""
    ranks, _, _ = large("bfloat16", 2)
    other, _, _ = large("bfloat16", 2)
    ranks.full(1)
    change(other.sources[0]["s"], 0.0001, np.random.default_rng(9))
    other.full(1)
    other.encode(2)
    with pytest.raises(TransferError, match="made from digest"):
        _stage_all(ranks, other.senders[0].messages(1))


def _stage_all(ranks: Ranks, messages: Sequence[np.ndarray]) -> None:
    for message in messages:
        ranks.receivers[1].stage(0, message)


def test_a_flipped_bit_under_a_change_is_found_before_anything_is_written() -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    ranks.sources[0]["s"][3, 5] ^= 0x100
    ranks.destinations[1]["half0"][3, 5] ^= 0x8000
    held = {name: array.copy() for name, array in ranks.destinations[1].items()}
    ranks.encode(2)
    ranks.stage(1)
    receiver = ranks.receivers[1]
    with pytest.raises(TransferError, match="does not make version 2 of what lies in memory"):
        receiver.commit(2)
    assert all((held[name] == array).all() for name, array in ranks.destinations[1].items())
    assert receiver.version is None


def test_memory_that_changes_after_the_proof_is_found_at_commit() -> None:
    ranks, _, _ = large("bfloat16", 2)
    ranks.full(1)
    change(ranks.sources[0]["s"], 1.0, np.random.default_rng(10))
    ranks.encode(2)
    ranks.stage(1)
    ranks.receivers[1].prove(2)
    ranks.destinations[1]["half1"][0, 0] ^= 1
    with pytest.raises(TransferError, match="must be full"):
        ranks.receivers[1].commit(2)
    assert ranks.receivers[1].version is None


def test_a_base_that_changed_in_memory_is_found_at_commit() -> None:
    ranks, _, _ = large("bfloat16", 2)
    sender = ranks.senders[0]
    ranks.full(1)
    change(ranks.sources[0]["s"], 1.0, np.random.default_rng(11))
    ranks.encode(2)
    sender._streams[0].kept.base[77] ^= 1
    with pytest.raises(InvariantBroken, match="changed in memory"):
        sender.commit()
    assert sender.base is None


def test_order_of_calls() -> None:
    ranks, _, _ = large("bfloat16", 2)
    sender, receiver = ranks.senders[0], ranks.receivers[1]
    with pytest.raises(InvariantBroken, match="expected a base"):
        sender.encode(1)
    with pytest.raises(InvariantBroken, match="commit without a version"):
        sender.commit()
    sender.full(1)
    with pytest.raises(InvariantBroken, match="pending"):
        sender.full(2)
    sender.abandon()
    with pytest.raises(InvariantBroken, match="expected a base"):
        sender.encode(2)
    ranks.full(2)
    with pytest.raises(InvariantBroken, match="3 messages are missing, the first 1 from rank 0"):
        receiver.commit(2)
    with pytest.raises(LayoutError, match="a whole number from 0"):
        sender.encode(1 << 64)
    with pytest.raises(LayoutError, match="message_bytes"):
        large("bfloat16", 2)[0].senders[0].__class__(ranks.plan, 0, message_bytes=7)
    with pytest.raises(LayoutError, match="half1: got nothing"):
        receiver.bind({"half0": ranks.destinations[1]["half0"]})
