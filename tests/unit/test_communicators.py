"""The NCCL communicator of a channel. Ranks are threads, NCCL a stand-in that carries their bytes."""

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

import numpy as np
import pytest
from fake_nccl import built
from reshard_gpu_fakes import FakeGpu

from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.models import MegatronParallel
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, nccl, nccl_transport, plan
from asyncmoe.weights import protocol
from asyncmoe.weights.protocol import EngineRanks, Terms
from asyncmoe.weights.receiver import channel, channel_end, hosting
from asyncmoe.weights.receiver.control_store import Store

TRAINERS, WORLD = 2, 5
SHAPE = (8, 16)
UPDATE = 3
SIDE: Any = SimpleNamespace(stream=SimpleNamespace(cuda_stream=0, device=SimpleNamespace(index=0)))


class Met:
    """A meeting of two trainer ranks with an engine of two and one of one, over one channel after the other."""

    def __init__(self, log: Path) -> None:
        engines = (EngineRanks("A", 2, 1, 2), EngineRanks("B", 1, 1, 4))
        session = secrets.token_hex(8)
        self.terms = Terms({}, None, MegatronParallel(), engines, "float32", "float32", "nccl", session, 1 << 16, 60.0, max_ctas=8)
        hosted = hosting.host("loopback")
        where = hosting.place(hosted)
        self.stores = [Store("test", 0, *where, 5.0, hosted), *(Store("test", rank, *where, 5.0) for rank in range(1, WORLD))]
        halves, wholes = [], []
        for rank in range(WORLD):
            builder = LayoutBuilder(rank, "int32")
            rows = SHAPE[0] // TRAINERS if rank < TRAINERS else SHAPE[0]
            start = rank * rows if rank < TRAINERS else 0
            builder.place("w", (rows, SHAPE[1]), [("w", Box((start, 0), (rows, SHAPE[1])), (0, 0))])
            (halves if rank < TRAINERS else wholes).append(builder.build())
        self.plan = plan({"w": SHAPE}, halves, wholes)
        self.exchangers: list[Exchanger] = []
        self.epoch, self._log = 0, log

    def connect(self) -> None:
        self.epoch += 1

        def one(rank: int) -> Exchanger:
            return channel.connect(self.stores[rank], self.terms, self.plan, self.epoch, SIDE, update=lambda: UPDATE)

        with ThreadPoolExecutor(WORLD) as threads:
            self.exchangers = list(threads.map(one, range(WORLD)))

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

        with ThreadPoolExecutor(WORLD) as threads:
            return list(threads.map(one, range(WORLD)))

    def update(self, value: int) -> None:
        self.connect()
        for more in range(2):
            assert self.send(value + more) == [None] * WORLD

    def leave(self) -> None:
        for exchanger in self.exchangers:
            exchanger.close()

    def counted(self, act: Callable[[], object]) -> dict[str, int]:
        """How many calls of each kind an act makes, of all ranks."""
        before = len(self._log.read_text().splitlines()) if self._log.exists() else 0
        act()
        found = Counter(line.split()[0] for line in self._log.read_text().splitlines()[before:])
        return {name: found[name] for name in ("init", "abort", "ctas")}


@pytest.fixture
def met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Met:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the stand-in with")
    monkeypatch.setenv("FAKE_NCCL_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_NCCL_MAIL", "1")
    library = built(tmp_path / "libnccl.so.2")
    monkeypatch.setattr(nccl, "find_nccl", lambda: library)
    monkeypatch.setattr(nccl_transport, "find_nccl", lambda: library)
    monkeypatch.setattr(channel_end, "Gpu", lambda device, relieve: FakeGpu())
    return Met(tmp_path / "log")


def test_all_ranks_of_a_channel_share_a_communicator_that_ends_with_it(met: Met) -> None:
    assert met.counted(lambda: met.update(1)) == {"init": WORLD, "abort": 0, "ctas": WORLD}
    assert met.counted(met.leave) == {"init": 0, "abort": WORLD, "ctas": 0}
    assert met.counted(lambda: met.update(10)) == {"init": WORLD, "abort": 0, "ctas": WORLD}
    met.leave()


def test_what_a_failed_update_left_behind_does_not_come_up_later(met: Met) -> None:
    met.update(1)
    ended = met.send(5, absent=[1], timeout_s=0.5)
    assert [str(error).startswith("waited") for error in ended[2:]] == [True] * 3
    met.leave()
    met.update(9)
    met.leave()


def test_who_waits_for_a_rank_that_has_failed_elsewhere_is_told_within_a_second(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL notices nothing: in an update the rank is there, and sends nothing; or it does not join."""
    met.update(1)
    began = time.monotonic()
    met.stores[1].fail(UPDATE, protocol.sent(UPDATE, 1), "out of memory")
    assert [str(error) for error in met.send(5, absent=[1], timeout_s=60.0)[2:]] == ["another rank has failed"] * 3
    met.leave()
    real = channel_end.open_nccl

    def refusing(end: channel_end.ChannelEnd) -> object:
        if end.rank == 4:
            raise UserError("NCCL", got="nothing", expected="a library")
        return real(end)

    monkeypatch.setattr(channel_end, "open_nccl", refusing)
    with pytest.raises(AsyncmoeError, match=r"NCCL: got nothing.*B rank 0"):
        met.connect()
    assert time.monotonic() - began < 10
