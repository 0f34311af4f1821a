"""Worker: the ranks of a tensor-parallel group share one fetch. `fetching.py RESULT PATH LAYOUT`"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from asyncmoe.errors import AsyncmoeError, WaitTimeout
from asyncmoe.log.log import Place
from asyncmoe.rpc.messages import Fetched, FindWorker, WorkerFound
from asyncmoe.trainer.data import batch_client, held, shared_fetch
from asyncmoe.trainer.model import mesh
from asyncmoe.trajectory import Buffer, encode
from tests.ranks import case, group
from tests.unit.kept_trajectory import trajectory

GONE, SHORT = 4, 5
"""Steps of which the worker does not answer, or with too little."""
HERE: Any = "here"
KEPT = [encode(trajectory(length, seed)[0]) for seed, length in enumerate((9, 300, 2, 41))]


def items_of(step: int) -> Any:
    """The batch of a step, which is the position of each of its places."""
    return [SimpleNamespace(key=f"g{seed}", place=Place(1, step)) for seed in range(len(KEPT))]


LEASED: Any = SimpleNamespace(step=3, items=items_of(3))


class Controller:
    """A client that answers itself, also for the worker."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def beside(self, *_: object) -> Controller:
        return self

    def ask(self, request: Any, timeout_s: float) -> tuple[Any, list[Buffer]]:
        if isinstance(request, FindWorker):
            return WorkerFound(HERE), []
        self.asked.append(list(request.keys))
        if request.places[0].position == GONE:
            raise WaitTimeout("rollout worker 1", "an answer", timeout_s)
        if request.places[0].position == SHORT:
            return Fetched(), []
        return Fetched(), [frame for key in request.keys for frame in KEPT[int(key[1:])]]


def main(result: Path, path: Path, layout: str) -> None:
    dist.init_process_group("gloo")
    place = mesh.start(case.config(path, ranks=dist.get_world_size(), **case.sizes_of(layout)).trainer)
    shared_fetch.PART_BYTES = 1000  # many parts
    held._AGAIN_S, held._TRIES = 0.0, 1
    controller: Any = Controller()
    found = {}
    for wanted in ([place.dp_rank, 3], [], [1], [0, 1, 2, 3]):
        found |= {tuple(wanted): batch_client.fetch(controller, place, LEASED, wanted)}
    refused = [refusal(controller, place, step) for step in (GONE, SHORT)]
    mine = {
        "refused": refused,
        "tp_rank": place.tp_rank,
        "dp_rank": place.dp_rank,
        "asked": controller.asked,
        "same": all(digest(one) == digest(trajectory_of(i)) for some in found.values() for i, one in some.items()),
        "counts": [len(some) for some in found.values()],
    }
    group.end(result, group.everyone(mine))


def refusal(controller: Any, place: mesh.Mesh, step: int) -> str:
    leased: Any = SimpleNamespace(step=step, items=items_of(step))
    try:
        batch_client.fetch(controller, place, leased, [1])
    except AsyncmoeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trajectory_of(number: int) -> Any:
    return batch_client.decode(KEPT[number])


def digest(one: Any) -> str:
    return hashlib.sha256(b"".join(bytes(frame) for frame in encode(one))).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
