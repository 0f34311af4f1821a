"""One trainer rank: `torchrun ... -m asyncmoe.trainer CONFIG [key=value ...]`."""

import logging
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from asyncmoe.platform import megatron

megatron.prepare()

from asyncmoe import config as configuration  # noqa: E402  Megatron must not be imported before the platform is prepared
from asyncmoe.errors import AsyncmoeError  # noqa: E402
from asyncmoe.process import die_with_parent, named, say  # noqa: E402
from asyncmoe.trainer import loop  # noqa: E402


def main() -> None:
    """Train; an error meant for the user is one line."""
    die_with_parent()
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(format=f"%(asctime)s rank {rank} %(name)s: %(message)s", level=logging.INFO)
    try:
        with named(f"trainer.{rank}"):
            loop.run(configuration.load(Path(sys.argv[1]), sys.argv[2:]))
    except AsyncmoeError as error:
        say(error)
        _leave(error.exit_code)
    except Exception:  # noqa: BLE001  nothing is swallowed: it is printed and the process ends
        with suppress(OSError):  # a log on a full disk
            traceback.print_exc()
        _leave(1)


def _leave(status: int) -> None:
    """End at once: other ranks may wait in a collective for this one, and threads of ours for an answer. torchrun ends the others."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
