"""Worker: rank 0 cannot start the receivers; every rank writes how its meeting ended. `meeting_fails.py RESULT`"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from asyncmoe.errors import AsyncmoeError, EngineError
from asyncmoe.trainer import direct_group

WHY = "engine.0 did not start: unrecognized arguments: --no-such-argument " + "é" * 1500


def main(result: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config: Any = SimpleNamespace(sync=SimpleNamespace(timeout_s=5.0))
    model: Any = SimpleNamespace(mesh=SimpleNamespace(rank=rank))
    said: list[Any] = [None] * dist.get_world_size()
    ended = ""
    engines = SimpleNamespace(roster=1)
    with (
        mock.patch.object(direct_group, "_ask_engines", return_value=engines),
        mock.patch.object(direct_group, "_keep", side_effect=EngineError(WHY)),
    ):
        try:
            direct_group._open(config, model, mock.Mock())
        except AsyncmoeError as error:
            ended = str(error)
    dist.all_gather_object(said, ended)
    if rank == 0:
        result.write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
