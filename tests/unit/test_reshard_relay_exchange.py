"""Relays carried out: by processes over gloo and shared memory, and by threads on random layouts."""

from __future__ import annotations

import multiprocessing
import secrets
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relay_ranks import SHAPES, TRAINERS, layouts, play
from reshard_ranks import blank, filled, numbered
from test_reshard_exchanger import Messages, ThreadTransport, Wires, on_ranks
from test_reshard_plan import Case
from test_reshard_random import cases

from asyncmoe.errors import LayoutError, TransferError
from asyncmoe.reshard import LayoutBuilder, Plan, RelayExchanger, relay
from asyncmoe.reshard.layout import whole
from asyncmoe.reshard.relay_exchange import needed_rounds
from benchmarks.network.cases import case, plans
from tests.unit.example_counts import examples


@pytest.mark.parametrize("engines", [2, 3])
@pytest.mark.parametrize("way", ["gloo", "shm"])
def test_trainers_send_the_bytes_of_one_engine(way: str, engines: int, tmp_path: Path) -> None:
    world, session = TRAINERS + 2 * engines, f"test-{secrets.token_hex(6)}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # once for all ranks
    processes = [context.Process(target=play, args=(rank, engines, way, str(tmp_path), session)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.is_alive():
            process.kill()
    moved = {int(path.stem): [int(n) for n in path.read_text().split()] for path in tmp_path.glob("*.done")}
    assert sorted(moved) == list(range(world))
    one_engine = sum(s.nbytes for layout in layouts(1)[1] for s in layout.storages.values())
    trailers = 16 * 4 * 30  # at most so many messages
    assert 0 <= sum(moved[rank][0] for rank in range(TRAINERS)) - one_engine < trailers
    for rank in range(TRAINERS, world):
        assert 0 <= moved[rank][1] - one_engine // 2 < trailers


@given(cases(), st.integers(1, 3), st.sampled_from([100, 400, 1 << 20]), st.integers(1, 3))
@settings(max_examples=examples(60), deadline=None)
def test_random_layouts_are_relayed(case: Case, replicas: int, bucket_bytes: int, buffers: int) -> None:
    shapes, source, one = case
    destination = [layout.at(10 * i + layout.rank) for i in range(replicas) for layout in one]
    plans = relay(shapes, source, destination)
    values, wires = numbered(shapes), [Wires(), Wires()]
    ranks = sorted({layout.rank for layout in (*source, *destination)})
    held = {layout.rank: filled(layout, values) for layout in source}
    got = {layout.rank: blank(layout) for layout in destination}

    def turn(rank: int) -> None:
        transports = [ThreadTransport(rank, wire) for wire in wires[: len(plans)]]
        with RelayExchanger(plans, transports, bucket_bytes=bucket_bytes * 20, buffers=buffers, timeout_s=20, threads=1) as exchanger:
            exchanger.bind(held.get(rank), got.get(rank))
            exchanger.run()

    assert on_ranks(ranks, turn) == []
    for layout in destination:
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[layout.rank][name], expected)


class Late(ThreadTransport):
    """Every message takes its time."""

    def exchange(self, sends: Messages, receives: Messages, timeout_s: float) -> None:
        time.sleep(0.02)
        super().exchange(sends, receives, timeout_s)


def test_nothing_is_passed_on_before_it_is_there_and_not_all_is_waited_for() -> None:
    source, destination = layouts(2)
    plans, values, wires = relay(SHAPES, source, destination), numbered(SHAPES), [Wires(), Wires()]
    got = {layout.rank: blank(layout) for layout in destination}
    order: list[tuple[int, int]] = []
    lock = threading.Lock()

    def turn(rank: int) -> None:
        class Noted(ThreadTransport):
            def exchange(self, sends: Messages, receives: Messages, timeout_s: float) -> None:
                with lock:
                    order.append((rank, 2))
                super().exchange(sends, receives, timeout_s)

        class NotedLate(Late):
            def exchange(self, sends: Messages, receives: Messages, timeout_s: float) -> None:
                super().exchange(sends, receives, timeout_s)
                with lock:
                    order.append((rank, 1))

        with RelayExchanger(
            plans, [NotedLate(rank, wires[0]), Noted(rank, wires[1])], bucket_bytes=1500, timeout_s=20, threads=1
        ) as exchanger:
            exchanger.bind(filled(source[rank], values) if rank < TRAINERS else None, got.get(rank))
            exchanger.run()

    assert on_ranks(range(6), turn) == []
    for layout in destination:
        for name, expected in filled(layout, values).items():
            np.testing.assert_array_equal(got[layout.rank][name], expected)
    mine = [round_number for rank, round_number in order if rank == TRAINERS]
    assert mine[0] == 1
    assert mine.index(2) < len(mine) - 1 - mine[::-1].index(1)  # the first forwarding before the last arrival


def test_a_short_transfer_is_forwarded_in_the_last_rounds() -> None:
    """Its few messages would otherwise all be due in the first rounds, and hold up what is ready."""
    shapes = {"w": (4096, 64), "v": (400, 64)}
    source = LayoutBuilder(0, "int32")
    source.stack("w", [("w", whole(shapes["w"]))])
    source.stack("v", [("v", whole(shapes["v"]))])
    large, small = LayoutBuilder(1, "int32"), LayoutBuilder(3, "int32")
    large.stack("w", [("w", whole(shapes["w"]))])
    small.stack("v", [("v", whole(shapes["v"]))])
    destination = [large.build(), large.build().at(2), small.build(), small.build().at(4)]
    plans = relay(shapes, [source.build()], destination)
    counts = {}
    for rank in (1, 3):
        with RelayExchanger(plans, [ThreadTransport(rank, Wires()) for _ in plans], bucket_bytes=20000, threads=1) as exchanger:
            assert exchanger._second is not None
            (chunks,) = exchanger._second.outgoing
            filled = sum(1 for nbytes in chunks.nbytes if nbytes)
            counts[rank] = len(chunks), filled, all(chunks.nbytes[-filled:])
    rounds = counts[1][0]
    assert counts[1] == (rounds, rounds, True)
    assert counts[3][0] == rounds
    assert 0 < counts[3][1] < rounds
    assert counts[3][2]


@given(cases(), st.integers(2, 3), st.sampled_from([12, 40, 200]))
@settings(max_examples=examples(100), deadline=None)
def test_a_message_waits_for_all_it_is_made_of(case: Case, replicas: int, limit: int) -> None:
    from asyncmoe.reshard.chunks import cut_transfer

    shapes, source, one = case
    destination = [layout.at(100 + 10 * i + layout.rank) for i in range(replicas) for layout in one]
    plans = relay(shapes, source, destination)
    for layout in destination:
        rank = layout.rank
        into, out = (
            (
                [cut_transfer(made, t, limit) for t in made.transfers if rank == end(t) and t.source != t.destination]
                for made, end in zip(plans, (lambda t: t.destination, lambda t: t.source), strict=False)
            )
            if len(plans) == 2
            else ([], [])
        )
        arrived = {name: np.full(s.size, -1) for name, s in layout.storages.items()}
        for chunks in into:
            for number in range(len(chunks)):
                for copy in chunks.copies[chunks.firsts[number] : chunks.firsts[number + 1]]:
                    elements(plans[0], rank, copy, arrived, "destinations")[...] = number
        needs = needed_rounds(plans, rank, into, out) if len(plans) == 2 else []
        for chunks in out:
            for number in range(len(chunks)):
                for copy in chunks.copies[chunks.firsts[number] : chunks.firsts[number + 1]]:
                    read = elements(plans[1], rank, copy, arrived, "sources")
                    assert read.min() >= 0
                    assert needs[number] > read.max()


def elements(made: Plan, rank: int, copy: np.ndarray, arrays: dict[str, np.ndarray], side: str) -> np.ndarray:
    """The elements of one of `arrays` (an entry for each of the storage's int32) that a copy writes or reads."""
    number, offset, strides = (2, 3, slice(14, 18)) if side == "destinations" else (0, 1, slice(10, 14))
    array = arrays[list(getattr(made, side)[rank])[copy[number]]]
    steps = [array.itemsize * int(s) // 4 for s in copy[strides]]
    return np.lib.stride_tricks.as_strided(array[copy[offset] // 4 :], copy[6:10].tolist(), steps)


def test_a_damaged_message_ends_both_rounds() -> None:
    def flip(source: int, destination: int, number: int, message: np.ndarray) -> None:
        if (source, destination, number) == (0, 2, 1):
            message[3] ^= 1

    source, destination = layouts(2)
    plans, values, wires = relay(SHAPES, source, destination), numbered(SHAPES), [Wires(flip), Wires()]
    got = {layout.rank: blank(layout) for layout in destination}

    def turn(rank: int) -> None:
        transports = [ThreadTransport(rank, wire) for wire in wires]
        with RelayExchanger(plans, transports, bucket_bytes=1500, timeout_s=1, threads=1) as exchanger:
            exchanger.bind(filled(source[rank], values) if rank < TRAINERS else None, got.get(rank))
            exchanger.run()

    failures = on_ranks(range(6), turn)
    damaged = [error for error in failures if isinstance(error, TransferError)]
    assert [(error.source, error.destination) for error in damaged] == [(0, 2)]


def test_a_relay_of_equal_layouts_wants_a_transport_a_round() -> None:
    builder = LayoutBuilder(0, "int32")
    builder.stack("s", [("t", whole((4,)))])
    plans = relay({"t": (4,)}, [builder.build()], [builder.build().at(1), builder.build().at(2)])
    with pytest.raises(LayoutError, match="1 for 2 plans"):
        RelayExchanger(plans, [ThreadTransport(0, Wires())])


def test_no_message_of_a_model_waits_long_after_its_turn() -> None:
    """Replicas of an engine of two ranks also pass on the little that both ranks have, as norms, in few and small messages."""
    one = case("2+4x2", 160)
    for rank in range(one.trainers, one.world):
        made = plans(one, relayed=True, ranks=[rank])
        wires = [ThreadTransport(rank, Wires()) for _ in made]
        with RelayExchanger(made, wires, bucket_bytes=512 << 10, threads=1) as exchanger:
            assert exchanger._second is not None
            arriving = max(len(chunks) for chunks in exchanger._first.incoming)
            needs = exchanger._second.needs
        late = [need / arriving - (number + 1) / len(needs) for number, need in enumerate(needs)]
        assert max(late) < 0.05, f"rank {rank}: message {late.index(max(late))} of {len(needs)}"
