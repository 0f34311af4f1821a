"""Which transport carries weights: decided by the trainer when ranks meet, and by the doctor before a run."""

from __future__ import annotations

from typing import Literal

from asyncmoe.errors import ConfigError


def transport_for(
    wanted: Literal["auto", "shm", "gloo", "nccl", "ipc"], gpu: bool, together: bool = True, shared: bool = False
) -> Literal["shm", "gloo", "nccl", "ipc"]:
    """How messages travel, from `sync.transport` and where the weights are.

    Args:
        together: all ranks share one machine's memory.
        shared: trainer and engines share GPUs (`engines.share_gpus`): NCCL refuses two ranks on one.

    Raises:
        ConfigError: a way that does not go there.
    """
    if gpu and shared and not together:
        cure = "keep the trainer and all engines on one machine, or give engines GPUs of their own"
        raise ConfigError("engines.share_gpus", got="true", expected="false between several machines", cure=cure)
    if gpu and shared and wanted == "nccl":
        raise ConfigError("sync.transport", got=wanted, expected="auto or ipc where trainer and engines share GPUs")
    if not together and wanted in ("shm", "ipc"):
        cure = "leave it out, or keep the trainer and all engines on one machine"
        raise ConfigError("sync.transport", got=wanted, expected="auto, gloo or nccl between several machines", cure=cure)
    possible = ("nccl", "ipc") if gpu else ("shm", "gloo")
    if wanted == "auto":
        return ("ipc" if shared else "nccl") if gpu else ("shm" if together else "gloo")
    if wanted not in possible:
        where = "GPUs" if gpu else "CPUs"
        raise ConfigError("sync.transport", got=wanted, expected=f"auto, {possible[0]} or {possible[1]} between {where}")
    return wanted
