"""The trainer's ranks and the model's parallel layout over them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from asyncmoe.config.trainer import TrainerSection
from asyncmoe.errors import ConfigError
from asyncmoe.platform import collectives, megatron
from asyncmoe.trainer.data.schedule import BatchGrid
from asyncmoe.trainer.model import gpu_settings

megatron.prepare()

from megatron.core import parallel_state as groups  # noqa: E402  only after the platform is prepared
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402


@dataclass(frozen=True)
class Mesh:
    """This process's position. Ranks follow Megatron's order: tensor-parallel fastest, then context, data, and pipeline slowest; expert
    parallelism spans tensor, context and data parallelism together. A stage holds `vpp` chunks of the model. A rank's row count is a
    multiple of `row_block`."""

    rank: int
    world: int
    tp: int
    pp: int
    vpp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    device: torch.device
    backend: str
    cp: int = 1
    cp_rank: int = 0
    row_block: int = 1

    @property
    def last_stage(self) -> bool:
        """True if this rank holds the output layer, in its last chunk, and sees logits."""
        return self.pp_rank == self.pp - 1

    @property
    def reports(self) -> bool:
        """True on one rank among those that see the same rows: only it counts them in sums over all ranks."""
        return self.last_stage and self.tp_rank == 0

    @property
    def fetches(self) -> bool:
        """True on one rank among those of a stage that train on the same trajectories (`replica_group`): it fetches them for all."""
        return self.tp_rank == 0 and self.cp_rank == 0

    @property
    def grid(self) -> BatchGrid:
        """Constraints on micro-batches."""
        return BatchGrid(self.tp, self.pp if self.vpp > 1 else 1, self.cp, self.row_block)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = groups.get_tensor_model_parallel_group()
        return group

    @property
    def cp_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = groups.get_context_parallel_group()
        return group

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """The ranks of this stage that train on the same trajectories: tensor- and context-parallel ones."""
        group: dist.ProcessGroup = groups.get_tensor_and_context_parallel_group()
        return group


def start(trainer: TrainerSection, seed: int = 0) -> Mesh:
    """Join torchrun's process group (or create a group of one) and create Megatron's groups over it.

    Uses the default process group if it exists. Collectives that wait longer than `trainer.timeout_s` end the run.

    Raises:
        ConfigError: torchrun's number of ranks differs from `trainer.ranks`.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != trainer.ranks:
        raise ConfigError(
            "trainer.ranks",
            got=trainer.ranks,
            expected=f"{world}, the number of ranks that torchrun started",
            hint="correct trainer.ranks, or torchrun's numbers of nodes and processes",
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        # The squares of small gradients are denormal numbers in Adam's averages, which make a CPU six times slower.
        torch.set_flush_denormal(True)
    backend = "nccl" if cuda else "gloo"
    timeout = timedelta(seconds=trainer.timeout_s)
    if not dist.is_initialized():
        collectives.join(backend, timeout)
    collectives.start(timeout)
    groups.initialize_model_parallel(
        trainer.tp,
        trainer.pp,
        trainer.vpp if trainer.vpp > 1 else None,
        context_parallel_size=trainer.cp,
        expert_model_parallel_size=trainer.ep,
        expert_tensor_parallel_size=trainer.expert_tp,
        distributed_timeout_minutes=trainer.timeout_s / 60,  # annotated int, but Megatron only makes a timedelta from it
    )
    model_parallel_cuda_manual_seed(seed)
    return Mesh(
        rank=dist.get_rank(),
        world=world,
        tp=trainer.tp,
        pp=trainer.pp,
        vpp=trainer.vpp,
        dp=groups.get_data_parallel_world_size(),
        tp_rank=groups.get_tensor_model_parallel_rank(),
        pp_rank=groups.get_pipeline_model_parallel_rank(),
        dp_rank=groups.get_data_parallel_rank(),
        device=device,
        backend=backend,
        cp=trainer.cp,
        cp_rank=groups.get_context_parallel_rank(),
        row_block=gpu_settings.ROWS if trainer.precision == "fp8" else 1,
    )


def stop() -> None:
    """Leave Megatron's groups and the process group."""
    groups.destroy_model_parallel()
    collectives.stop()
