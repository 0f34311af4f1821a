"""The torchrun command line that starts trainer ranks on a machine."""

from __future__ import annotations

import socket

TRAINER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One OpenMP thread per rank, because ranks that outnumber the cores would spin against each other and against the engines."""


def torchrun(ranks: int, master: tuple[str, int], module: str, *arguments: str, node: int = 0, nodes: int = 1) -> list[str]:
    """Return the Python arguments that start the trainer ranks of one machine.

    Args:
        ranks: number of ranks on this machine.
        master: address and free port of the first machine.
        module: Python module that each rank runs.
        node: index of this machine among the trainer's `nodes` machines.
    """
    where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks)]
    meeting = ["--master-addr", master[0], "--master-port", str(master[1])]
    return ["-m", "torch.distributed.run", *where, *meeting, "--max-restarts", "0", "-m", module, *arguments]


def free_port(host: str) -> int:
    """Return a TCP port of `host` that is free at the moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
