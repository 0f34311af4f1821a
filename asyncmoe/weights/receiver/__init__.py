"""The engine's side of weight sync: a receiver inside every SGLang worker, and the code it shares with the trainer's sender.

SGLang is started with `--custom-weight-loader asyncmoe.weights.receiver.load` and calls `load` in each worker when a weight update names it
as its format. A weight's path in the worker:

1. `platform/sglang/receiver_command.py`: the controller (`weights/coordinator/ways.py`) sends a `JoinCommand`; `worker.py` starts a
   receiver thread.
2. `worker.py`: the thread connects to rank 0's store (`control_store.py`), reads `TERMS`, plans (`transfer_plan.py`), reports parameters
   and GPU under `ready(rank)` (`handshake.py`, `cards.py`), and waits for `VERDICT` (rank 0 checks with `handshake.py` and `cards.py`).
3. `channel.py`: at `header(N)` with a new channel E, all ranks connect (`channel(E, stage, rank)`): `channel_end.py` opens the transport
   that the terms name.
4. `worker.py`: the thread receives the worker's shards into staging memory (`weight_buffers.py`) while the worker generates, checks their
   digests and sets `staged(N, rank)`. No parameter is written. For a delta it stores the encoded bytes, and verifies that they turn the
   current parameters into the version (`deltas.py`).
5. The controller sends a `CommitCommand`, which the engine executes between two forward passes: `worker.py`, in the worker's main thread,
   makes the staged tensors the parameters (`weight_buffers.py`), or writes the delta into them, and the engine serves the version.

`protocol.py` defines all keys and messages, `failing.py` the reports of failures; `asyncmoe.weights.sender` lists the trainer's side.
Besides this package, the receiver needs only numpy, msgspec and torch, and from SGLang only its ranks and settings (`handshake.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Execute commands (see `receiver_command.payload`). SGLang calls it in a worker's main thread.

    Raises:
        InvariantBroken: a commit of a version that is not staged; the worker must not continue.
        ProtocolError: the text is not a command.
    """
    # The controller imports this package for its commands and does not need torch.
    from asyncmoe.weights.receiver.worker import obey

    for text, _ in named_tensors:
        obey(model, text)
