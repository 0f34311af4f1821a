"""The ranks of an engine over several machines meet at the engine's address, and their store listens nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncmoe.engines.nodes import MeetingPlace

AS_SERVERS = "import torch; torch.cuda.is_available = lambda: True; import asyncmoe.platform.sglang.server"
"""What the processes of a server import; what they import on a CPU needs SGLang besides."""
MEET = """
import sys
import torch.distributed as dist
url, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=url, world_size=2, rank=rank)
tables = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/self/net/{table}")]
listening = [words[1] for words in tables if words[3] == "0A" and words[1].endswith(f":{int(url.rpartition(':')[2]):04X}")]
dist.barrier()
print(*listening)
"""


@pytest.mark.parametrize(
    ("imported", "listens_on"),
    [pytest.param(AS_SERVERS, "0100007F", id="ours"), pytest.param("", "0" * 32, id="torch", marks=pytest.mark.thorough)],
)
def test_the_store_listens_on_the_address_alone(imported: str, listens_on: str) -> None:
    place = MeetingPlace("127.0.0.1")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, "-c", f"{imported}\n{MEET}", place.url, str(rank)] for rank in range(2)]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        for rank in ranks:
            said, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
            assert [one.partition(":")[0] for one in said.split()] == [listens_on]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        place.close()
