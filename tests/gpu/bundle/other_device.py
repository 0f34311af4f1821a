"""Exchanges in threads whose current device is another than the arrays': `python -m tests.gpu.bundle.other_device RESULT`.

On a machine with several cards the arrays lie on the last one, and a new thread's device is 0. On a machine with one card
`torch.cuda.current_device` says 1 instead, which is what torch's export of an array compares with.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch

from asyncmoe.reshard import Box, Exchanger, LayoutBuilder, LocalTransport, plan
from tests.gpu.bundle.summary import write_outcome

_ROWS, _COLUMNS = 512, 384
_WAIT_S = 60.0


def main() -> None:
    cards = torch.cuda.device_count()
    device = torch.device("cuda", cards - 1)
    failures: list[BaseException] = []

    def exchange() -> None:
        try:
            _exchange(device)
        except BaseException as error:  # noqa: BLE001  it is raised again in the main thread
            failures.append(error)

    with mock.patch("torch.cuda.current_device", return_value=1) if cards == 1 else nullcontext():
        thread = threading.Thread(target=exchange, name="exchange", daemon=True)
        thread.start()
        thread.join(_WAIT_S)
    if thread.is_alive():
        sys.exit(f"an exchange in another thread: still running after {_WAIT_S:.0f} s")
    if failures:
        raise failures[0]
    way = "the arrays on the last card, the thread on card 0" if cards > 1 else "one card; torch's current device patched to 1"
    write_outcome(Path(sys.argv[1]), {"way": (way, ""), "cards": (cards, "GPUs")})


def _exchange(device: torch.device) -> None:
    """Copy an array to another on the same device, and look at what came."""
    shapes = {"w": (_ROWS, _COLUMNS)}
    layout = LayoutBuilder(0, "float32")
    layout.stack("w", [("w", Box((0, 0), (_ROWS, _COLUMNS)))])
    whole = layout.build()
    source = torch.arange(_ROWS * _COLUMNS, device=device, dtype=torch.float32).reshape(_ROWS, _COLUMNS)
    got = torch.full_like(source, -1)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.default_stream(device))
    with Exchanger(plan(shapes, [whole], [whole]), LocalTransport(0), stream=side.cuda_stream) as exchanger:
        exchanger.bind({"w": source}, {"w": got})
        exchanger.run(_WAIT_S)
    assert torch.equal(got, source), "what arrived is not what was sent"


if __name__ == "__main__":
    main()
