"""`python -m asyncmoe.launch.slurm CONFIG [key=value ...]`: started by `slurm/train.sbatch` on the first node of its allocation."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncmoe.errors import UserError
from asyncmoe.launch import part
from asyncmoe.launch.slurm.command import Stop, forget_options
from asyncmoe.process import unbroken_output


def main() -> None:
    """Run a configuration in this allocation. Signals are handled before the long imports: an unhandled one ends the process."""
    stop = Stop()
    unbroken_output()
    forget_options()
    part.main(lambda: _run(sys.argv[1:], stop))


def _run(arguments: list[str], stop: Stop) -> None:
    from asyncmoe.launch.slurm import supervise

    if not arguments:
        hint = "sbatch --nodes=N slurm/train.sbatch CONFIG [key=value ...]"
        raise UserError("CONFIG", got="nothing", expected="a YAML file", hint=hint)
    supervise.run(Path(arguments[0]), arguments[1:], stop)


if __name__ == "__main__":
    main()
