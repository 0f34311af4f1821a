"""The choice of the checkpoint that all ranks resume from. The ranks share the reading of its files, and agree on the result."""

from __future__ import annotations

import logging
from pathlib import Path

from asyncmoe import checkpoints
from asyncmoe.checkpoints import directories, intact
from asyncmoe.errors import UserError
from asyncmoe.platform import collectives
from asyncmoe.trainer.model.mesh import Mesh

log = logging.getLogger(__name__)


def choose(run_dir: Path, mesh: Mesh) -> Path | None:
    """Return the newest intact checkpoint; None if the run has no checkpoint. Collective over all ranks.

    A damaged checkpoint is set aside in favour of the previous one. Nothing is renamed until an intact one is found, so damage never
    makes a run start over.

    Raises:
        DataError: the run has checkpoints, and every one is damaged.
        UserError: a rank cannot read a file, although it may be intact.
    """
    newest_first = collectives.everyones(directories.complete(run_dir)[::-1] if mesh.rank == 0 else [])[0]
    found = intact.first_intact(newest_first, lambda path: agreed_fault(path, mesh))
    for line, one in zip(found.lines, found.damaged, strict=True) if mesh.rank == 0 else ():
        log.warning("%s; the damaged one is now %s", line, checkpoints.set_aside(one.path).name)
    collectives.barrier()
    return found.newest


def agreed_fault(checkpoint: Path, mesh: Mesh) -> str | None:
    """Return, on every rank, the fault found by the lowest rank; None if no rank found one."""
    mine: tuple[str | None, str]
    try:
        mine = intact.fault(checkpoint, rank=mesh.rank, world=mesh.world), ""
    except UserError as error:
        mine = None, str(error)
    found = collectives.everyones(mine)
    for rank, (_, why) in enumerate(found):
        if why:
            raise UserError(f"{checkpoint.name} on rank {rank}", got=why, expected="files that every rank can read")
    return next((fault for fault, _ in found if fault is not None), None)
