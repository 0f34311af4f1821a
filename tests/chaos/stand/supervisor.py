"""`asyncmoe` with the ranks of `rank` in place of the trainer's: `python -m tests.chaos.stand.supervisor run CONFIG`."""

from __future__ import annotations

from asyncmoe.__main__ import main
from asyncmoe.launch import commands


def torchrun(ranks: int, master: tuple[str, int], module: str, *arguments: str, node: int = 0, nodes: int = 1) -> list[str]:
    """Return the arguments of the Python that starts the ranks."""
    return ["-m", "tests.chaos.stand.agent", *arguments, str(ranks)]


if __name__ == "__main__":
    commands.torchrun = torchrun
    main()
