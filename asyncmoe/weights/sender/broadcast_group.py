"""The process group over which the trainer broadcasts weights to the engines.

It is separate from torch's default groups, which differ between the trainer's ranks and the engines' ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncmoe.errors import WeightSyncError
from asyncmoe.weights.receiver.control_store import open_at
from asyncmoe.weights.receiver.hosting import Hosted, place


def join(hosted: Hosted, world: int, group: str, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """Join `group` as rank 0; return when all `world` ranks have joined.

    Takes the same steps as SGLang's `init_custom_process_group` (`sglang.srt.utils.common`), which the engines run: a store, prefixed with
    the group's name, and a backend outside the default group. Under torchrun, `tcp://` would make every rank a client of torchrun's own
    store, so rank 0 creates the store itself, on the caller's socket.

    Args:
        hosted: what `asyncmoe.weights.receiver.hosting.host` returned. The store takes ownership of a socket; a file must be kept as
            long as the group is used.
        backend: "gloo" or "nccl".
        timeout_s: limit on the rendezvous, and on every collective of the group.

    Raises:
        WeightSyncError: the other ranks did not join in time.
    """
    timeout = timedelta(seconds=timeout_s)
    c10d: Any = distributed_c10d
    host, port = place(hosted)
    try:
        store = open_at(host, port, timeout, hosted)
        made, _ = c10d._new_process_group_helper(
            world, 0, [], c10d.Backend(backend), c10d.PrefixStore(group, store), group_name=group, backend_options=None, timeout=timeout
        )
    except (RuntimeError, TimeoutError) as error:
        raise WeightSyncError(f"weight group {group} at {host}:{port}: {error}") from error
    # Without this entry `broadcast(src=0)` would look up the source among the ranks of the default group.
    c10d._world.pg_group_ranks[made] = {index: index for index in range(world)}
    return cast(dist.ProcessGroup, made)


def leave(group: dist.ProcessGroup, backend: str) -> None:
    """Free a group that `join` returned, without waiting for its other ranks, which may be gone."""
    if backend == "nccl":
        c10d: Any = distributed_c10d
        c10d._abort_process_group(group)  # `destroy_process_group` waits for messages under way
    else:
        dist.destroy_process_group(group)
