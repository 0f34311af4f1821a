"""Replicas that pass on what they get: every byte once, and no more from the sources than one replica needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_steps import carry_out
from reshard_ranks import blank, filled, numbered
from test_reshard_plan import Case
from test_reshard_random import Shapes, cases

from asyncmoe.models import EngineParallel, MegatronParallel, family_of
from asyncmoe.reshard import PADDING, Box, LayoutBuilder, Plan, RankLayout, arrival, plan, relay
from asyncmoe.reshard.chunks import Chunks, at_the_end, cut_transfer
from asyncmoe.reshard.layout import rows, whole
from asyncmoe.reshard.plan import COLUMNS, DESTINATION, EXTENTS, ITEM, SOURCE, Transfer
from asyncmoe.reshard.relay import relay_matches
from asyncmoe.reshard.relay_exchange import needed_rounds
from benchmarks.published import REAL
from tests.unit.example_counts import examples


def copied_bytes(rounds: tuple, rank: int) -> int:
    copies = [t.copies for made in rounds for t in made.transfers if t.destination == rank]
    return sum(int((c[:, 6:10].prod(1) * c[:, 5]).sum()) for c in copies)


@given(cases(), st.integers(1, 4))
@settings(max_examples=examples(100), deadline=None)
def test_every_replica_gets_every_byte_once(case: Case, replicas: int) -> None:
    shapes, source, destination = case
    values = numbered(shapes)
    layouts = [layout.at(10 * i + layout.rank) for i in range(replicas) for layout in destination]
    rounds = relay(shapes, source, layouts)
    assert len(rounds) <= 2
    sources = {layout.rank: filled(layout, values) for layout in source}
    got = {layout.rank: blank(layout) for layout in layouts}
    carry_out(rounds[0], sources, got)
    for later in rounds[1:]:
        carry_out(later, got, got)
    for layout in layouts:
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[layout.rank][name], expected)
        assert copied_bytes(rounds, layout.rank) == sum(s.nbytes for s in layout.storages.values())
    only_sources = {layout.rank for layout in source} - {layout.rank for layout in layouts}
    for later in rounds[1:]:
        assert not only_sources & {t.source for t in later.transfers}


@given(cases(), st.integers(2, 4))
@settings(max_examples=examples(50), deadline=None)
def test_sources_send_the_bytes_of_one_replica(case: Case, replicas: int) -> None:
    shapes, source, destination = case
    layouts = [layout.at(100 + 10 * i + layout.rank) for i in range(replicas) for layout in destination]
    distinct = {(tuple(d.storages.items()), tuple(d.pieces)): d for d in destination}
    rounds = relay(shapes, source, layouts)
    assert rounds[0].wire_bytes == sum(4 * p.box.size for d in distinct.values() for p in d.pieces if p.tensor != PADDING)
    assert rounds[0].wire_bytes + sum(r.wire_bytes for r in rounds[1:]) <= 4 * sum(
        p.box.size for d in layouts for p in d.pieces if p.tensor != PADDING
    )


@given(cases(), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_every_rank_plans_its_own_rounds(case: Case, replicas: int) -> None:
    shapes, source, destination = case
    layouts = [layout.at(10 * i + layout.rank) for i in range(replicas) for layout in destination]
    rounds = relay(shapes, source, layouts)
    for rank in {layout.rank for layout in (*source, *layouts)}:
        mine = relay(shapes, source, layouts, ranks=[rank])
        assert [made.digest for made in mine] == [made.digest for made in rounds]
        for part, full in zip(mine, rounds, strict=True):
            expected = [(t.source, t.destination, t.nbytes, t.check) for t in full.transfers if rank in (t.source, t.destination)]
            assert [(t.source, t.destination, t.nbytes, t.check) for t in part.transfers] == expected


def one_tensor(rank: int) -> RankLayout:
    builder = LayoutBuilder(rank, "bfloat16")
    builder.stack("s", [("t", whole((4096, 512))), (PADDING, rows((4, 512), 0, 4))])
    return builder.build()


@pytest.mark.parametrize("replicas", [2, 3, 7])
def test_one_large_piece_is_cut_evenly(replicas: int) -> None:
    source = LayoutBuilder(0, "bfloat16")
    source.stack("s", [("t", whole((4096, 512)))])
    first, second = relay({"t": (4096, 512)}, [source.build()], [one_tensor(1 + i) for i in range(replicas)])
    into = {t.destination: t.nbytes for t in first.transfers if t.nbytes}
    assert sum(into.values()) == 4 << 20
    assert max(into.values()) - min(into.values()) <= 1024
    assert second.wire_bytes == (replicas - 1) * (4 << 20)
    assert max(second.egress.values()) <= 1.05 * second.wire_bytes / replicas


def test_different_layouts_are_sent_straight() -> None:
    shapes: Shapes = {"t": (4, 4)}
    builders = [LayoutBuilder(rank, "int32") for rank in range(3)]
    for builder, name in zip(builders, ("s", "d", "e"), strict=True):
        builder.stack(name, [("t", whole((4, 4)))])
    source, *wanted = (builder.build() for builder in builders)
    assert len(relay(shapes, [source], wanted)) == 1
    assert relay(shapes, [source], [])[0].transfers == ()


@pytest.mark.parametrize("engines", [1, 4, 16])
def test_egress_of_a_real_trainer_does_not_grow_with_engines(engines: int) -> None:
    hf = REAL["Qwen3-235B-A22B"]
    family, trainer, engine = family_of(hf), MegatronParallel(tp=4, pp=2, ep=32, dp=32, te=True), EngineParallel(8, 8)
    layouts = family.sglang_layouts(hf, engine, "bfloat16", engines, first=trainer.world)
    one = [sum(s.nbytes for s in layout.storages.values()) for layout in layouts[: engine.tp]]
    first, *later = relay_matches(family.tensors(hf), family.megatron_layouts(hf, trainer, "bfloat16"), layouts)
    traffic = first.traffic()
    assert traffic[:, 2].sum() == sum(one)
    sent = np.bincount(traffic[:, 0], traffic[:, 2], trainer.world)
    assert sent.max() <= 1.05 * sent.mean()
    received = np.bincount(traffic[:, 1] - trainer.world, traffic[:, 2], engines * engine.tp)
    for match in later:
        passed = match.traffic()
        assert passed[:, 0].min() >= trainer.world
        sent = np.bincount(passed[:, 0] - trainer.world, passed[:, 2], engines * engine.tp)
        assert sent.max() <= 1.05 * sent.mean()
        received += np.bincount(passed[:, 1] - trainer.world, passed[:, 2], engines * engine.tp)
    assert received.astype(int).tolist() == one * engines


def halves(rows: int, replicas: int) -> tuple[dict[str, tuple[int, ...]], list[RankLayout], list[RankLayout]]:
    """A tensor of rows of 4 KiB: its halves on two sources, all of it on each replica."""
    shapes = {"w": (rows, 1024)}
    source, whole_of = [], LayoutBuilder(2, "int32")
    for rank in range(2):
        builder = LayoutBuilder(rank, "int32")
        builder.stack("w", [("w", Box((rank * rows // 2, 0), (rows // 2, 1024)))])
        source.append(builder.build())
    whole_of.stack("w", [("w", Box((0, 0), (rows, 1024)))])
    return shapes, source, [whole_of.build().at(2 + replica) for replica in range(replicas)]


@pytest.mark.parametrize("replicas", [2, 3])
def test_what_arrives_together_is_forwarded_together(replicas: int) -> None:
    """Both sources send from the first moment on. A replica that forwarded the half of the first before that of the second would wait for
    the end of the one and then still have all of the other to send."""
    first, second = relay(*halves(960, replicas))
    for layout in halves(960, replicas)[2]:
        rank = layout.rank
        into = [cut_transfer(first, t, 1 << 30, 40) for t in first.transfers if t.destination == rank]
        out = [cut_transfer(second, t, 1 << 30, 40) for t in second.transfers if t.source == rank]
        assert {chunks.source for chunks in into} <= {0, 1}
        needs = needed_rounds((first, second), rank, into, out)
        rounds = max(len(chunks) for chunks in into)
        late = [need - (number + 1) * rounds / len(needs) for number, need in enumerate(needs)]
        assert max(late) <= 2, f"replica {rank} can forward message {late.index(max(late))} of {len(needs)} only after {needs}"


def test_both_ends_of_a_forwarding_know_its_order() -> None:
    shapes, source, destination = halves(960, 3)
    whole_plan = relay(shapes, source, destination)[1]
    for transfer in whole_plan.transfers:
        for rank in (transfer.source, transfer.destination):
            part = relay(shapes, source, destination, ranks=[rank])[1]
            same = next(t for t in part.transfers if (t.source, t.destination) == (transfer.source, transfer.destination))
            columns = [column for column in range(COLUMNS) if column not in (SOURCE, DESTINATION)]
            np.testing.assert_array_equal(same.copies[:, columns], transfer.copies[:, columns])


@pytest.mark.parametrize("replicas", [2, 4])
def test_every_source_sends_its_share_to_every_replica(replicas: int) -> None:
    """Else a source's link to one replica is the narrowest, while the rest of its traffic waits."""
    rows = 16384
    first, _ = relay(*halves(rows, replicas), ranks=[0])
    traffic = first.match.traffic()
    assert len(traffic) == 2 * replicas
    assert traffic[:, 2].sum() == rows * 4096
    share = rows * 4096 / (2 * replicas)
    assert abs(traffic[:, 2] / share - 1).max() < 0.2


@given(st.integers(1, 20), st.integers(1, 60))
def test_few_messages_go_last(rows: int, rounds: int) -> None:
    shapes, source, destination = halves(2 * rows, 1)
    made = plan(shapes, source, destination)
    chunks = cut_transfer(made, made.transfers[0], 8192)
    found = at_the_end(chunks, rounds)
    empty = max(0, rounds - len(chunks))
    assert found.nbytes == (0,) * empty + chunks.nbytes
    np.testing.assert_array_equal(found.copies, chunks.copies)
    assert len(found.firsts) == len(found) + 1
    for number, nbytes in enumerate(found.nbytes):
        boxes = found.copies[found.firsts[number] : found.firsts[number + 1]]
        assert (boxes[:, EXTENTS].prod(1) * boxes[:, ITEM]).sum() == nbytes


def test_what_arrives_at_a_rank_is_computed_once_for_all_that_it_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each transfer: that is most of the time of planning with many replicas."""
    cuts: list[tuple[int, int]] = []

    def counted(made: Plan, transfer: Transfer, *how: int) -> Chunks:
        cuts.append((transfer.source, transfer.destination))
        return cut_transfer(made, transfer, *how)

    monkeypatch.setattr(arrival, "cut_transfer", counted)
    first, second = relay(*halves(4096, 4))
    assert len(second.transfers) > 4
    assert sorted(cuts) == sorted((t.source, t.destination) for t in first.transfers)
