"""Worker: what ranks that meet engines agree on. `meetings.py RESULT`

fails    how the meeting ended on every rank where rank 0 cannot start the receivers
again    of every rank: whether a version that is sent can be sent again, whether its weights then wait for that, and whether it still can
         when rank 1 has gone on to change them
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from asyncmoe.errors import AsyncmoeError, EngineError
from asyncmoe.weights.sender import rendezvous
from asyncmoe.weights.sender.reshard import ReshardPublisher
from tests.ranks import group

WHY = "engine.0 did not start: unrecognized arguments: --no-such-argument " + "é" * 1500


def main(result: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config: Any = SimpleNamespace(sync=SimpleNamespace(timeout_s=5.0, verify_every=0), engines=SimpleNamespace(start_timeout_s=5.0))
    model: Any = SimpleNamespace(mesh=SimpleNamespace(rank=rank))
    ended = ""
    engines = SimpleNamespace(roster=1, awaited=False, engines=(SimpleNamespace(device="cpu"),))
    with (
        mock.patch.object(rendezvous, "ask_engines", return_value=engines),
        mock.patch.object(rendezvous, "_keep", side_effect=EngineError(WHY)),
    ):
        try:
            rendezvous._open(config, model, mock.Mock(), dist.group.WORLD)
        except AsyncmoeError as error:
            ended = str(error)
    found = {"fails": group.everyone(ended), "again": group.everyone(again())}
    if rank == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


def again() -> list[bool]:
    """Of a sender without engines whose part is sent."""
    sender: Any = object.__new__(ReshardPublisher)
    vars(sender).update(_hold=threading.Lock(), _sent=threading.Event(), _changing=False, _group=dist.group.WORLD)
    vars(sender).update(_bounded=lambda what: None, _model=SimpleNamespace(adapter=None))
    sender._sent.set()
    while_all_have = sender._still_has()
    kept = not sender._sent.is_set()
    if dist.get_rank() == 1:
        step = threading.Thread(target=sender.wait_sent)
        step.start()
        step.join(1.5)
        kept = kept and step.is_alive()
        sender._sent.set()
        step.join(5.0)
    return [while_all_have, kept, sender._still_has()]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
