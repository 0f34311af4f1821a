"""The shared main function of this package's commands: it installs signal handlers first and reports an error in one line."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence

from asyncmoe.errors import AsyncmoeError
from asyncmoe.launch.slurm.signals import Stop
from asyncmoe.process import say


def main(run: Callable[[Sequence[str], Stop], None]) -> None:
    """Call `run` with the arguments of the command; the exit status of a failure tells a user error from others."""
    stop = Stop()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", level=logging.INFO)
    try:
        run(sys.argv[1:], stop)
    except AsyncmoeError as error:
        say(error)
        sys.exit(error.exit_code)
