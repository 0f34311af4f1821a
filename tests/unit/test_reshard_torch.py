"""Messages over a real gloo process group."""

from __future__ import annotations

import gc
import multiprocessing
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reshard_ranks import Stripes, blank

from asyncmoe.errors import WaitTimeout
from asyncmoe.process import wait_until
from asyncmoe.reshard import exchange
from asyncmoe.reshard.torch_transport import TorchTransport
from asyncmoe.reshard.transport import Lane, MessageLink

STRIPES = Stripes(2, (12, 10))


def _join(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=30))


def _all_to_all(rank: int, world: int, store: str, into: str) -> None:
    _join(rank, world, store)
    transport = TorchTransport()
    for number in range(3):  # over the same group
        mine = {name: torch.from_numpy(array) for name, array in STRIPES.sent(rank, number).items()}
        got = {name: torch.from_numpy(array) for name, array in blank(STRIPES.destination[rank]).items()}
        exchange(STRIPES.plan, transport, mine, got, timeout_s=30)
        STRIPES.check(rank, {name: tensor.numpy() for name, tensor in got.items()}, number)
    dist.destroy_process_group()
    Path(into, str(rank)).write_text("done")


def _alone(rank: int, world: int, store: str, into: str) -> None:
    """Rank 0 waits for a message that rank 1 never sends."""
    _join(rank, world, store)
    if rank == 0:
        transport = TorchTransport()
        started = time.monotonic()
        following = transport.post([], [(1, transport.empty(8))]), transport.post([], [(1, transport.empty(8))])
        with pytest.raises(WaitTimeout, match="rank 1: its message"):
            following[0](1.0)
        assert 0.9 < time.monotonic() - started < 10
        with pytest.raises(WaitTimeout, match="rank 1: its message"):
            following[1](300.0)  # at once: nothing follows what did not arrive
        assert time.monotonic() - started < 10
        Path(into, "0").write_text("done")
    else:
        wait_until(Path(into, "0").exists, 30)
        Path(into, "1").write_text("done")


def _between(rank: int, world: int, store: str, into: str) -> None:
    """Rank 2 waits for a message that rank 1 never sends, and posts the next round only then. Gloo has closed all its pairs by then."""
    _join(rank, world, store)
    if rank == 2:
        transport = TorchTransport()
        buffer = _failed_round(transport)
        gc.collect()
        assert buffer() is None, "the transport keeps no error, whose frames would keep the buffers"
        Path(into, "2").write_text("done")
        return
    if rank == 0:
        TorchTransport().exchange([(2, torch.zeros(8, dtype=torch.uint8))], [], 10.0)
    wait_until(Path(into, "2").exists, 30)
    Path(into, str(rank)).write_text("done")


def _failed_round(transport: TorchTransport) -> weakref.ref[object]:
    link = MessageLink(transport, [], [Lane(0, (8, 8), 8), Lane(1, (8, 8), 8)], slots=2)
    link.close_round(0, 1.0)
    time.sleep(2.0)
    with pytest.raises(WaitTimeout, match="rank 1: its message"):
        link.close_round(1, 1.0)
    buffer: weakref.ref[object] = weakref.ref(link._in[0][0])
    link.close()
    return buffer


@pytest.mark.parametrize(("play", "world"), [(_all_to_all, 2), (_alone, 2), (_between, 3)])
def test_gloo(play: object, world: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed", "asyncmoe.reshard.torch_transport"])
    arguments = (world, str(tmp_path / "store"), str(tmp_path))
    processes = [context.Process(target=play, args=(rank, *arguments)) for rank in range(world)]  # type: ignore[arg-type]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "store") == [str(rank) for rank in range(world)]
