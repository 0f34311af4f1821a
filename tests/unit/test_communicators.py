"""One communicator an engine: who comes or goes costs the others nothing. Ranks are threads, NCCL a stand-in that carries their bytes."""

from __future__ import annotations

import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_nccl import built
from reshard_gpu_fakes import FakeGpu

from asyncmoe.errors import AsyncmoeError
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, nccl_room, plan
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import EngineRanks, Terms
from asyncmoe.weights.receiver import channel, hosting
from asyncmoe.weights.receiver.communicators import Agreed, Communicators, HeldCommunicator, agree, members
from asyncmoe.weights.receiver.control_store import Store

TRAINERS = 2
SHAPE = (8, 16)
UPDATE = 3
SIZES = {"A": 2, "B": 1, "C": 1}


def terms(*engines: str) -> Terms:
    first, ranks = TRAINERS, []
    for name in engines:
        ranks.append(EngineRanks(name, SIZES[name], 1, first))
        first += SIZES[name]
    session = secrets.token_hex(8)
    return Terms({}, None, {}, tuple(ranks), "float32", "float32", "nccl", session, 1 << 16, 10.0, max_ctas=8)


# ---------------------------------------------------------------- who holds what


def test_ranks_of_a_communicator_do_not_depend_on_other_engines() -> None:
    three = terms("A", "B", "C")
    assert members(three, three.engines[2]) == {0: 0, 1: 1, 5: 2}
    alone = terms("C")
    assert members(alone, alone.engines[0]) == {0: 0, 1: 1, 2: 2}


def test_what_all_ranks_hold_is_kept_and_the_rest_is_made() -> None:
    a, b = HeldCommunicator("a", 3), HeldCommunicator("b", 3)
    held = {
        0: {"A": a, "B": b},
        1: {"A": a, "B": b, "C": HeldCommunicator("old", 3)},
        2: {"A": a},
        3: {"A": a},
        4: {"B": HeldCommunicator("b", 2)},
        5: {},
    }
    agreed = agree(terms("A", "B", "C"), held, lambda: b"new")
    assert agreed["A"] == Agreed("a")
    assert [agreed[name].unique_id for name in "BC"] == [b"new", b"new"]
    assert len({one.id for one in agreed.values()} | {"a", "b", "old"}) == 5


@pytest.mark.parametrize(("engines", "given"), [(1, 8), (16, 8), (32, 4), (256, 4)])
def test_kernels_of_all_engines_fit_onto_a_device(engines: int, given: int) -> None:
    assert nccl_room.max_ctas(8, engines) == given
    assert nccl_room.max_ctas(2, engines) == 2


# ---------------------------------------------------------------- meetings


class World:
    """Processes that keep their communicators from meeting to meeting."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.kept: dict[str, Communicators] = {}

    def process(self, name: str) -> Any:
        """What a process has of a side stream."""
        kept = self.kept.setdefault(name, Communicators(0, gpu=FakeGpu(), library=self.library))
        return SimpleNamespace(stream=SimpleNamespace(cuda_stream=0, device=SimpleNamespace(index=0)), communicators=kept)

    def counted(self, act: Callable[[], object]) -> dict[str, int]:
        """How many calls of each kind an act makes."""
        log = Path(self.library).with_name("log")
        before = len(log.read_text().splitlines()) if log.exists() else 0
        act()
        lines = log.read_text().splitlines()[before:] if log.exists() else []
        found = Counter(line.split()[0] for line in lines)
        return {name: found[name] for name in ("init", "abort", "destroy", "ctas")}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the stand-in with")
    monkeypatch.setenv("FAKE_NCCL_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_NCCL_MAIL", "1")
    return World(built(tmp_path / "libnccl.so.2"))


class Met:
    """A meeting of the trainer with some engines, over one channel after the other."""

    def __init__(self, world: World, *engines: str) -> None:
        self.terms = terms(*engines)
        hosted = hosting.host("loopback")
        where = hosting.place(hosted)
        first = Store("test", 0, *where, 5.0, hosted)
        self.stores = [first, *(Store("test", rank, *where, 5.0) for rank in range(1, self.terms.world))]
        self.sides = [world.process(name) for name in self.names]
        halves, wholes = [], []
        for rank in range(self.terms.world):
            builder = LayoutBuilder(rank, "int32")
            rows = SHAPE[0] // TRAINERS if rank < TRAINERS else SHAPE[0]
            start = rank * rows if rank < TRAINERS else 0
            builder.place("w", (rows, SHAPE[1]), [("w", Box((start, 0), (rows, SHAPE[1])), (0, 0))])
            (halves if rank < TRAINERS else wholes).append(builder.build())
        self.plan = plan({"w": SHAPE}, halves, wholes)
        self.exchangers: list[Exchanger] = []
        self.epoch = 0

    @property
    def names(self) -> list[str]:
        return [f"t{rank}" for rank in range(TRAINERS)] + [f"{e.name}{tp}" for e in self.terms.engines for tp in range(e.tp)]

    def connect(self) -> None:
        self.epoch += 1

        def one(rank: int) -> Exchanger:
            return channel.connect(self.stores[rank], self.terms, self.plan, self.epoch, self.sides[rank], update=lambda: UPDATE)

        with ThreadPoolExecutor(self.terms.world) as threads:
            self.exchangers = list(threads.map(one, range(self.terms.world)))

    def send(self, value: int, absent: Sequence[int] = (), timeout_s: float = 10.0) -> list[AsyncmoeError | None]:
        """An update, of which every engine gets everything; who failed."""
        whole = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE) + value

        def one(rank: int) -> AsyncmoeError | None:
            if rank in absent:
                return None
            rows = SHAPE[0] // TRAINERS
            mine = {"w": whole[rank * rows : (rank + 1) * rows].copy()} if rank < TRAINERS else None
            got = None if rank < TRAINERS else {"w": np.zeros(SHAPE, np.int32)}
            self.exchangers[rank].bind(mine, got)
            try:
                self.exchangers[rank].run(timeout_s)
            except AsyncmoeError as error:
                return error
            if got is not None:
                np.testing.assert_array_equal(got["w"], whole)
            return None

        with ThreadPoolExecutor(self.terms.world) as threads:
            return list(threads.map(one, range(self.terms.world)))

    def update(self, value: int) -> None:
        self.connect()
        assert self.send(value) == [None] * self.terms.world
        assert self.send(value + 1) == [None] * self.terms.world

    def leave(self) -> None:
        for exchanger in self.exchangers:
            exchanger.close()


NOTHING = {"init": 0, "abort": 0, "destroy": 0, "ctas": 0}


def test_a_join_makes_one_communicator_and_a_leave_ends_one(world: World) -> None:
    """Counted in calls: one of a communicator is one on each of its ranks."""
    first = Met(world, "A", "B")
    assert world.counted(lambda: first.update(1)) == {**NOTHING, "init": 4 + 3, "ctas": 4 + 3}
    assert world.counted(first.leave) == NOTHING
    joined = Met(world, "A", "B", "C")
    assert world.counted(lambda: joined.update(10)) == {**NOTHING, "init": 3, "ctas": 3}
    joined.leave()
    left = Met(world, "B", "C")
    assert world.counted(lambda: left.update(20)) == {**NOTHING, "abort": TRAINERS}
    left.leave()
    again = Met(world, "B", "C")
    assert world.counted(lambda: again.update(30)) == NOTHING
    again.leave()
    assert world.counted(world.kept["t0"].close) == {**NOTHING, "destroy": 2}


def test_a_restarted_engine_has_its_own_made_anew(world: World) -> None:
    met = Met(world, "A", "B")
    met.update(1)
    met.leave()
    gone = world.kept.pop("B0")
    assert gone.held()
    assert world.counted(lambda: Met(world, "A", "B").update(2)) == {**NOTHING, "init": 3, "ctas": 3, "abort": TRAINERS}


def test_a_failed_update_takes_what_it_went_over_with_it(world: World) -> None:
    met = Met(world, "A", "B")
    met.update(1)
    ended = met.send(5, absent=[1], timeout_s=0.5)
    assert [str(error).startswith("waited") for error in ended[2:]] == [True] * 3
    assert world.counted(met.leave) == NOTHING  # those that failed have ended theirs already
    assert world.counted(lambda: met.update(9)) == {**NOTHING, "init": 4 + 3, "ctas": 4 + 3, "abort": 2 * TRAINERS}
    met.leave()


def test_who_waits_for_a_rank_that_has_failed_elsewhere_is_told_within_a_second(world: World) -> None:
    """NCCL notices nothing: the rank is there, and sends nothing."""
    met = Met(world, "A", "B")
    met.update(1)
    began = time.monotonic()
    met.stores[1].fail(UPDATE, protocol.sent(UPDATE, 1), "out of memory")
    ended = met.send(5, absent=[1], timeout_s=60.0)
    assert time.monotonic() - began < 10
    assert [str(error) for error in ended[2:]] == ["another rank has failed"] * 3
    met.leave()
    assert world.counted(lambda: met.update(9))["init"] == 4 + 3
    met.leave()


def test_who_waits_for_a_communicator_that_another_rank_cannot_make_is_told_within_a_second(world: World, tmp_path: Path) -> None:
    met = Met(world, "A", "B")
    met.terms = msgspec.structs.replace(met.terms, timeout_s=60.0)
    met.sides[4].communicators = Communicators(0, gpu=FakeGpu(), library=str(tmp_path / "none.so"))
    began = time.monotonic()
    with pytest.raises(AsyncmoeError, match=r"none\.so.*B rank 0"):
        met.connect()
    assert time.monotonic() - began < 10


def test_messages_that_a_receiver_slept_through_do_not_come_up_later(world: World) -> None:
    """What it did not take lies in its communicator, though no sender has noticed."""
    met = Met(world, "A", "B")
    met.update(1)
    assert met.send(5, absent=[4]) == [None] * 5
    met.leave()
    assert world.counted(lambda: met.update(9)) == {**NOTHING, "init": 3, "ctas": 3, "abort": 3}
    met.leave()


def test_an_update_under_way_is_not_gone_on_with(world: World) -> None:
    met = Met(world, "B")
    met.connect()
    assert [side.communicators.held() for side in met.sides] == [{}] * 3
    met.leave()
    found = {one["B"] for one in (side.communicators.held() for side in met.sides)}
    assert len(found) == 1
