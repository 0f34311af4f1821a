"""The command line that starts trainer ranks on a machine."""

from __future__ import annotations

import socket

TRAINER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""One OpenMP thread a rank: more ranks than cores would otherwise spin against each other and against the engines."""


def torchrun(ranks: int, master: tuple[str, int], module: str, *arguments: str, node: int = 0, nodes: int = 1) -> list[str]:
    """Arguments of Python for one of a trainer's machines.

    Args:
        ranks: on this machine.
        master: address and free port of the first machine.
        module: what each rank runs.
        node: number of this machine among the trainer's `nodes`.
    """
    where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks)]
    meeting = ["--master-addr", master[0], "--master-port", str(master[1])]
    return ["-m", "torch.distributed.run", *where, *meeting, "--max-restarts", "0", "-m", module, *arguments]


def free_port(host: str) -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
