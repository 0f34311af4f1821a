"""`python -m asyncmoe.launch.slurm CONFIG [key=value ...]`: what `slurm/train.sbatch` becomes on the first node of its allocation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncmoe.errors import UserError
from asyncmoe.launch.slurm.command import main
from asyncmoe.launch.slurm.signals import Stop


def run(arguments: Sequence[str], stop: Stop) -> None:
    """Run a configuration in this allocation."""
    from asyncmoe.launch.slurm import supervise  # seconds of imports, after signals are handled

    if not arguments:
        cure = "sbatch --nodes=N slurm/train.sbatch CONFIG [key=value ...]"
        raise UserError("CONFIG", got="nothing", expected="a YAML file", cure=cure)
    supervise.run(Path(arguments[0]), arguments[1:], stop)


if __name__ == "__main__":
    main(run)
