"""`asyncmoe` and `python -m asyncmoe`: the command line, or without its packages one line that says how to install them."""

from __future__ import annotations

import os
import sys

from asyncmoe import interrupts
from asyncmoe.errors import UserError
from asyncmoe.imports import uncollected


def main() -> None:
    """Run the command line."""
    _settle_streams()
    with interrupts.leaving(interrupts.NOTHING_BEGUN):  # around every import that takes time
        from asyncmoe import installed
    try:
        with interrupts.leaving(interrupts.NOTHING_BEGUN), uncollected():
            from asyncmoe import cli
    except ModuleNotFoundError as error:
        if (refused := installed.explained(error)) is None:
            raise
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(UserError.exit_code)
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


if __name__ == "__main__":
    main()
