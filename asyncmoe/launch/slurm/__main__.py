"""`python -m asyncmoe.launch.slurm CONFIG [key=value ...]`: started by `slurm/train.sbatch` on the first node of its allocation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncmoe.errors import UserError
from asyncmoe.launch.slurm.command import Stop, main


def run(arguments: Sequence[str], stop: Stop) -> None:
    """Run a configuration in this allocation."""
    from asyncmoe.launch.slurm import supervise  # imports for seconds, so only after the signal handlers are set

    if not arguments:
        hint = "sbatch --nodes=N slurm/train.sbatch CONFIG [key=value ...]"
        raise UserError("CONFIG", got="nothing", expected="a YAML file", hint=hint)
    supervise.run(Path(arguments[0]), arguments[1:], stop)


if __name__ == "__main__":
    main(run)
