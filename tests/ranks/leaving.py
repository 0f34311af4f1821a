"""Leaving the groups that a model has trained over, so that they end."""

from __future__ import annotations

import gc

from megatron.core.distributed import DistributedDataParallel

from asyncmoe.trainer.model import mesh


def leave() -> None:
    """Leave Megatron's groups; all models of this process are done with.

    A model that has trained is never collected: nodes of autograd, which Python does not see, hold the hooks of Megatron's DDP. It holds
    its groups, each of which has three threads over Gloo, and one of these wakes a hundred times a second.
    """
    for one in gc.get_objects():
        if type(one) is DistributedDataParallel:
            vars(one).clear()
    mesh.leave()
    gc.collect()
