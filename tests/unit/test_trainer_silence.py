"""A rank that waits in vain in a collective names the rank that hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncmoe.rpc.address import LOOPBACK
from asyncmoe.trainer.model import silence

PROGRAM = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from asyncmoe.trainer.model import silence

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout=timedelta(seconds=2))
dist.all_reduce(torch.ones(1))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    print(silence.explained(error), flush=True)
os._exit(0)
"""


def test_the_rank_that_is_stopped_is_named() -> None:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(port)], cwd=root, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        said = [ranks[rank].communicate(timeout=60)[0] for rank in (0, 2)]
    finally:
        for rank in ranks:
            rank.kill()
    expected = "trainer rank 1 took no part in a collective for 2 s (trainer.timeout_s): hung, stopped or slow\n"
    assert expected in said, said


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), ValueError("Timed out waiting 1ms for recv operation")])
def test_other_errors_are_not(error: Exception) -> None:
    assert silence.explained(error) is None
