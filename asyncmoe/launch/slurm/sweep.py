"""One task of a job array, on line SLURM_ARRAY_TASK_ID of FILE: `python -m asyncmoe.launch.slurm.sweep CONFIG FILE [key=value ...]`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncmoe import config as configuration
from asyncmoe.errors import DataError, UserError
from asyncmoe.launch.slurm.command import Stop, main


def run(arguments: Sequence[str], stop: Stop) -> None:
    """Run the configuration with the overrides of one line."""
    from asyncmoe.launch.slurm import supervise  # imports for seconds, so only after the signal handlers are set

    if len(arguments) < 2:
        hint = "sbatch --array=1-N --nodes=M slurm/sweep.sbatch CONFIG FILE [key=value ...]"
        raise UserError("arguments", got=len(arguments), expected="a YAML file and a file of overrides", hint=hint)
    path, lines = Path(arguments[0]), Path(arguments[1])
    if not lines.is_file():
        raise DataError(str(lines), got="no such file", expected="a file with the overrides of one run on each line")
    number = task(os.environ)
    own = line(lines.read_text(encoding="utf-8"), number, str(lines))
    configured = configuration.load(path, [*arguments[2:], *own]).run.dir
    supervise.run(path, [*arguments[2:], *directory(configured, own, number)], stop)


def task(environ: Mapping[str, str]) -> int:
    """Return the array index of this task.

    Raises:
        UserError: the job is not an array.
    """
    found = environ.get("SLURM_ARRAY_TASK_ID", "")
    if not found.isdigit():
        raise UserError("SLURM_ARRAY_TASK_ID", got=found or "no such variable", expected="a job array", hint="sbatch --array=1-N ...")
    return int(found)


def line(text: str, number: int, name: str) -> list[str]:
    """Return the overrides of run `number`, from 1; empty lines and lines that begin with # are not counted.

    Raises:
        DataError: there is no such line, or its quotes are unbalanced.
    """
    runs = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not 1 <= number <= len(runs):
        hint = f"sbatch --array=1-{len(runs)} ..."
        raise DataError(name, got=f"array task {number}", expected=f"1 to {len(runs)}, its lines of overrides", hint=hint)
    try:
        return shlex.split(runs[number - 1])
    except ValueError as error:
        raise DataError(f"{name}, run {number}", got=f"{runs[number - 1]!r} ({error})", expected="key=value words") from error


def directory(configured: Path, own: Sequence[str], number: int) -> list[str]:
    """Return a line's overrides, with a run directory below the sweep's directory unless the line names one."""
    if any(override.startswith("run.dir=") for override in own):
        return list(own)
    return [*own, f"run.dir={configured / f'run-{number}'}"]


if __name__ == "__main__":
    main(run)
