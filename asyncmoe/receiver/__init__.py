"""Weights that arrive shard to shard: the part that runs inside every SGLang worker, and what it shares with the sender.

SGLang is started with `--custom-weight-loader asyncmoe.receiver.load` and calls `load` in each worker when a weight update names it
as its format. `Join` starts a thread that keeps a process group with the trainer's ranks, beside SGLang's own. It is driven by the
sender through a store (`control_store`), receives this worker's own bytes into staging memory while the worker generates, and touches no
parameter. `Commit`, called while the worker stands still, makes the staged tensors the parameters.

Needs only numpy, msgspec and torch besides this package; nothing of SGLang is imported but its record of its own ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """What SGLang calls, in a worker's main thread: carry out commands (see `command.payload`).

    Raises:
        InvariantBroken: a commit of something that is not staged; the worker must not go on.
        ProtocolError: not a command.
    """
    # The controller imports this package for its commands and has no use for torch.
    from asyncmoe.receiver.worker import obey

    for text, _ in named_tensors:
        obey(model, text)
