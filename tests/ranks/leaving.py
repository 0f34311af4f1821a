"""Destroys the groups that a model has trained over."""

from __future__ import annotations

import gc

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from asyncmoe.trainer.model.mesh import groups


def leave() -> None:
    """Leave Megatron's groups, but not the process group; no model of this process is used any more.

    A model that has trained is never collected: nodes of autograd, which Python does not see, hold the hooks of Megatron's DDP. It holds
    its groups, each of which has three threads over Gloo, and one of these wakes a hundred times a second. Megatron destroys a few of its
    groups and only forgets the others.
    """
    for one in gc.get_objects():
        if type(one) is DistributedDataParallel:
            vars(one).clear()
    created = groups._global_process_group_list or ()
    groups.destroy_model_parallel()
    for group in created:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    gc.collect()
