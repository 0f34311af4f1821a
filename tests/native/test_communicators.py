"""The NCCL communicator of a channel. Ranks are threads, NCCL a stand-in that carries their bytes."""

from __future__ import annotations

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
import torch
from fake_nccl import built
from reshard_gpu_fakes import FakeGpu
from reshard_ranks import on_ranks
from test_transports import meeting, one_to_two

from asyncmoe.errors import AsyncmoeError, UserError
from asyncmoe.reshard import Exchanger, nccl, nccl_transport
from asyncmoe.weights import protocol
from asyncmoe.weights.receiver import channel, channel_end

WORLD, UPDATE = 3, 3
SIDE: Any = SimpleNamespace(handle=0, device=torch.device("cuda", 0), relieve=lambda: None)


class Met:
    """A meeting of a trainer rank with an engine of two, over one channel after the other."""

    def __init__(self, log: Path) -> None:
        terms, self.stores = meeting("nccl")
        self.terms = msgspec.structs.replace(terms, timeout_s=60.0, max_ctas=8)
        self.exchangers: list[Exchanger] = []
        self.epoch, self._log = 0, log

    def connect(self) -> None:
        self.epoch += 1

        def one(rank: int) -> Exchanger:
            return channel.connect(self.stores[rank], self.terms, one_to_two(), self.epoch, SIDE, update=lambda: UPDATE)

        with ThreadPoolExecutor(WORLD) as threads:
            self.exchangers = list(threads.map(one, range(WORLD)))

    def send(self, value: int, ranks: Sequence[int] = range(WORLD), timeout_s: float = 10.0) -> list[str]:
        """An update in which some ranks take part; what failed, by rank."""
        whole = np.arange(128, dtype=np.int32).reshape(8, 16) + value
        got = {rank: {"w": np.zeros((4, 16), np.int32)} for rank in (1, 2)}

        def one(rank: int) -> None:
            self.exchangers[rank].bind({"w": whole} if rank == 0 else None, got.get(rank))
            self.exchangers[rank].run(timeout_s)
            if rank:
                np.testing.assert_array_equal(got[rank]["w"], whole[4 * rank - 4 : 4 * rank])

        return [str(error) for error in on_ranks(ranks, one).values()]

    def update(self, value: int) -> None:
        self.connect()
        assert self.send(value) == self.send(value + 1) == []

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
    for _ in range(2):
        assert met.counted(lambda: met.update(1)) == {"init": WORLD, "abort": 0, "ctas": WORLD}
        assert met.counted(met.leave) == {"init": 0, "abort": WORLD, "ctas": 0}


def test_what_an_update_left_behind_does_not_come_up_later(met: Met) -> None:
    """Messages that a rank slept through, and those of an update that failed."""
    met.update(1)
    assert met.send(5, (0, 1)) == []
    met.leave()
    met.update(9)
    assert [said.startswith("waited") for said in met.send(5, (1, 2), timeout_s=0.5)] == [True, True]
    met.leave()
    met.update(20)
    met.leave()


def test_who_waits_for_a_rank_that_has_failed_elsewhere_is_told_within_a_second(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL notices nothing: in an update the rank is there, and sends nothing; or it does not join."""
    met.update(1)
    began = time.monotonic()
    met.stores[0].fail(UPDATE, protocol.sent(UPDATE, 0), "out of memory")
    assert met.send(5, (1, 2), timeout_s=60.0) == ["another rank has failed"] * 2
    met.leave()
    real = channel_end.open_nccl

    def refusing(end: channel_end.ChannelEnd) -> object:
        if end.rank == 2:
            raise UserError("NCCL", got="nothing", expected="a library")
        return real(end)

    monkeypatch.setattr(channel_end, "open_nccl", refusing)
    with pytest.raises(AsyncmoeError, match=r"NCCL: got nothing.*A rank 1"):
        met.connect()
    assert time.monotonic() - began < 10
