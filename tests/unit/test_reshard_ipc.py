"""The protocol of messages in device memory, with a fake GPU and the ranks as threads."""

from __future__ import annotations

import time

import pytest
from reshard_gpu_fakes import FakeGpu
from reshard_ranks import Stripes, on_ranks

from asyncmoe.errors import LayoutError, TransferError, WaitTimeout
from asyncmoe.reshard import Exchanger, ipc_transport, plan
from asyncmoe.reshard.ipc_transport import IpcTransport
from asyncmoe.reshard.shm_transport import ShmTransport
from asyncmoe.reshard.transport import Lane

STRIPES = Stripes(3)


@pytest.mark.parametrize(("looks", "buffers"), [(0, 1), (1, 3), (5, 2)])
def test_all_to_all_again_and_again(session: str, buffers: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_transport, "_kept", kept := [])

    def part(rank: int) -> None:
        transport = IpcTransport(rank, session, 0, gpu=FakeGpu(looks))
        with Exchanger(STRIPES.plan, transport, bucket_bytes=3000, buffers=buffers, timeout_s=30, threads=1) as exchanger:
            STRIPES.run(rank, exchanger, 3)

    assert on_ranks(range(3), part) == {}
    assert not kept  # every receiver has let go before its sender has lost patience


def linked(session: str, looks: int, timeout_s: float = 20) -> tuple[object, object]:
    lane = ((16,) * 5, 16)
    found: dict[int, object] = {}

    def part(rank: int) -> None:
        lanes = [Lane(1 - rank, *lane)]
        transport = IpcTransport(rank, session, 0, gpu=FakeGpu(looks))
        found[rank] = transport.connect(lanes if rank == 0 else [], lanes if rank else [], 2, timeout_s)

    assert on_ranks(range(2), part) == {}
    return found[0], found[1]


def test_a_slot_is_handed_over_when_its_kernel_is_done(session: str) -> None:
    sender, receiver = linked(session, looks=1 << 60)
    sender.pack_into(0, 0, 5)
    sender.post(0, 0)
    sender.close_round(0, 5)
    with pytest.raises(WaitTimeout, match="rank 0: its message"):
        receiver.unpack_from(0, 0, 0.3)
    sender._pending[0][0].left = 0
    sender.close_round(0, 5)
    assert receiver.unpack_from(0, 0, 5).nbytes == 16


def test_a_slot_is_not_filled_twice_before_it_is_handed_over(session: str) -> None:
    sender, _ = linked(session, looks=1 << 60)
    first, second = sender.pack_into(0, 0, 5), None
    sender.post(0, 0)
    second = sender.pack_into(0, 1, 5)
    sender.post(0, 1)
    assert first.address != second.address
    with pytest.raises(WaitTimeout, match="stream"):
        sender.pack_into(0, 2, 0.3)


def test_a_receiver_that_leaves_is_missed(session: str) -> None:
    sender, receiver = linked(session, looks=0)
    for number in range(2):
        sender.pack_into(0, number, 5)
        sender.post(0, number)
    sender.close_round(0, 5)
    receiver.unpack_from(0, 0, 5)
    receiver.close()
    del receiver
    with pytest.raises(TransferError, match="rank 1 is gone"):
        sender.pack_into(0, 2, 30)
    started = time.monotonic()
    sender.close()
    assert time.monotonic() - started < 5


def test_arrays_of_a_gpu_do_not_go_through_messages_of_the_host(session: str) -> None:
    made = plan(STRIPES.shapes, STRIPES.source, STRIPES.destination[:1])
    exchanger = Exchanger(made, ShmTransport(1, session), timeout_s=5)
    exchanger._link.device = "cuda:0"
    with pytest.raises(LayoutError, match="got cpu and cuda:0, expected all on one device"):
        exchanger.bind(STRIPES.sent(1), None)
