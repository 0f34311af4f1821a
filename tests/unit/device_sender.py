"""`device_sender.py LIBRARY`: `ReshardPublisher`'s sending thread on the second GPU of the stand-in, in a process, as Megatron wants."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncmoe.errors import WeightSyncError
from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, LocalTransport, plan
from asyncmoe.weights.sender.publisher import Published
from asyncmoe.weights.sender.reshard import ReshardPublisher

sys.path.insert(0, str(Path(__file__).parent))
from device_standin import Machine, on_device1


class OneRank(ReshardPublisher):
    """Of which only the sending is real; nobody is met."""

    def __init__(self, act: Any) -> None:
        self._model = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("cuda", 1), rank=0, world=1))  # type: ignore[assignment]
        self._config = SimpleNamespace(engines=SimpleNamespace(start_timeout_s=5.0))  # type: ignore[assignment]
        self._sync = SimpleNamespace(timeout_s=5.0)  # type: ignore[assignment]
        self._expected = SimpleNamespace(of_next=lambda: ())  # type: ignore[assignment]
        self._rank, self._side = 0, None
        self._snapshot = SimpleNamespace(take=lambda: None)  # type: ignore[assignment]
        self._act = act
        self._running, self._tried = None, 0.0
        self._settling, self._sent, self._hold = threading.Event(), threading.Event(), threading.Lock()

    def _publish(self, version: int, expected: Any) -> Published | None:
        self._act()
        return Published(version, 0.0, 0.0)


def main(library: str) -> None:
    machine = Machine(Path(library))
    machine.install(SimpleNamespace(setattr=setattr))
    machine.call("swap", 1)
    builder = LayoutBuilder(0, "float32")
    builder.stack("w", [("w", Box((0, 0), (4, 8)))])
    layout = builder.build()

    def send() -> None:
        source, target = on_device1(4, 8), on_device1(4, 8)
        source.fill_(3.0)
        with Exchanger(plan({"w": (4, 8)}, [layout], [layout]), LocalTransport()) as exchanger:
            exchanger.bind({"w": source}, {"w": target})
            exchanger.run()
        assert (target == 3).all()

    sender = OneRank(send)
    sender.begin(1)
    assert sender.settle() is not None
    gc.collect()
    print(f"sent on cuda:1, contexts {sorted(machine.contexts)}")

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    sender = OneRank(fail)
    sender.begin(2)
    with pytest.raises(WeightSyncError, match=r"^out of memory: .*sync\.bucket_bytes.*\(trainer rank 0 on .*, cuda:1\)"):
        sender.settle()
    print("told")


if __name__ == "__main__":
    main(sys.argv[1])
