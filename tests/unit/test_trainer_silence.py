"""A rank that waits in vain in a collective names the rank that hangs."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asyncmoe.rpc.address import LOOPBACK
from asyncmoe.trainer.model import silence


def take_part(rank: int, port: int, folder: str) -> None:
    """Stop in the second collective if this is rank 1; else write down what is said of it."""
    dist.init_process_group("gloo", init_method=f"tcp://{LOOPBACK}:{port}", rank=rank, world_size=3, timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        Path(folder, str(rank)).write_text(str(silence.explained(error)))
    os._exit(0)


def test_the_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch.distributed", "asyncmoe.trainer.model.silence"])
    ranks = [context.Process(target=take_part, args=(rank, port, str(tmp_path))) for rank in range(3)]
    for rank in ranks:
        rank.start()
    try:
        for rank in (ranks[0], ranks[2]):
            rank.join(60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    said = [path.read_text() for path in tmp_path.iterdir()]
    assert "trainer rank 1 took no part in a collective for 2 s (trainer.timeout_s): hung, stopped or slow" in said, said


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ValueError("Timed out waiting 1ms for recv operation")])
def test_other_errors_are_not(error: Exception) -> None:
    assert silence.explained(error) is None
