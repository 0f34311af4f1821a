"""Entry point of `asyncmoe` and `python -m asyncmoe`; if packages are missing, one line says how to install them."""

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
    """Open descriptors 0 to 2 if closed, and use UTF-8 for paths and files in any locale, in this process and its children.

    Otherwise a file that a library opens could get the number of a closed standard stream, and be written to as one.
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
