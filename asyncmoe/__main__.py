"""`asyncmoe` and `python -m asyncmoe`: the command line, or without its packages one line that says how to install them."""

from __future__ import annotations

import os
import sys

from asyncmoe import interrupts
from asyncmoe.errors import UserError
from asyncmoe.imports import uncollected

COMMANDS = {
    "run": "everything on this machine: engines, queue, trainer, live view, report",
    "rollout": "only the controller",
    "engine": "one engine that joins a run",
    "worker": "one rollout worker of a run",
    "make-model": "a tiny random model",
    "export": "a run's checkpoint in Hugging Face's format",
    "import-checkpoint": "a Hugging Face checkpoint from one of Megatron-LM or Megatron-Bridge",
    "doctor": "what on this machine would stop a run",
    "plan": "memory of every GPU, and a split of a cluster",
    "simulate": "the speed of a run on a cluster",
    "config": "show, validate and describe configurations",
    "report": "summary and report of a run",
    "checkpoints": "the checkpoints of a run: listed, verified, brought back",
    "log": "the log of a run: listed, verified",
    "stacks": "the Python stacks of a run's processes",
    "show": "trajectories of a run",
    "bench": "the benchmarks of a checkout",
}
"""What --help says of each command where typer is not installed."""


def main() -> None:
    """Run the command line."""
    _settle_streams()
    with interrupts.leaving(interrupts.NOTHING_BEGUN):  # around every import that takes time
        from asyncmoe import installed
    try:
        with interrupts.leaving(interrupts.NOTHING_BEGUN), uncollected():
            from asyncmoe import cli
    except ModuleNotFoundError as error:
        if installed.explained(error, "asyncmoe") is None:
            raise
        _without_packages(error, sys.argv[1:])
    else:
        cli.main()


def _settle_streams() -> None:
    """Give this process and its children the descriptors 0 to 2, and UTF-8 for paths and files, whatever the locale.

    Of a descriptor that the shell has closed the number would go to a library's file, which others then take for a standard stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    if sys.getfilesystemencoding() != "utf-8":  # Python chooses it at its start
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _without_packages(error: ModuleNotFoundError, arguments: list[str]) -> None:
    """Answer where the command line's own packages are missing; every command but the questions for help and version is refused."""
    from asyncmoe import installed

    command = next((word for word in arguments if not word.startswith("-")), None)
    if "--version" in arguments and command is None:
        print(f"asyncmoe {_version()}")
    elif command is None or command not in COMMANDS:
        print(_help())
        sys.exit(0 if command is None else 2)
    else:
        refused: UserError | None = installed.explained(error, f"asyncmoe {command}")
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(UserError.exit_code)


def _help() -> str:
    from asyncmoe import installed

    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"asyncmoe {_version()}: asynchronous reinforcement learning of mixture-of-experts language models.",
            "",
            "This environment has asyncmoe.reshard, which needs only NumPy. The commands need an extra:",
            f"  plan, simulate, doctor, config   {installed.fix('cli')}",
            f"  all others                       {installed.fix('train')}",
            f"  engines, in their own venv       {installed.fix('engine')}",
            "",
            "Commands:",
            *(f"  asyncmoe {name:<{width}}  {what}" for name, what in COMMANDS.items()),
        ]
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow

    try:
        return version("asyncmoe")
    except PackageNotFoundError:
        return "of a checkout"


if __name__ == "__main__":
    main()
