"""One trainer rank: `torchrun ... -m asyncmoe.trainer CONFIG [key=value ...]`."""

import logging
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from asyncmoe import config as configuration
from asyncmoe.errors import AsyncmoeError
from asyncmoe.imports import uncollected
from asyncmoe.models.hub import with_local_model
from asyncmoe.process import die_with_parent, leave, named, say
from asyncmoe.rpc.environment import AGENT
from asyncmoe.telemetry import heartbeats, processes
from asyncmoe.trainer.model import environment


def main() -> None:
    """Train; print user-facing errors as one line."""
    die_with_parent(int(os.environ[AGENT]) if AGENT in os.environ else None)
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(format=f"%(asctime)s rank {rank} %(name)s: %(message)s", level=logging.INFO)
    try:
        with named(f"trainer.{rank}"):
            config = with_local_model(configuration.load(Path(sys.argv[1]), sys.argv[2:]), download=False)
            processes.record(config.run.dir, f"trainer.{rank}")
            heartbeats.start(config.run.dir, f"trainer.{rank}", config.watch.beat_s)
            with uncollected():
                environment.prepare(config)
                from asyncmoe.platform import megatron

                megatron.prepare()
                from asyncmoe.trainer import loop  # Megatron must not be imported before the platform is prepared
            loop.run(config)
            heartbeats.beat(heartbeats.ENDED)
    except AsyncmoeError as error:
        say(error)
        leave(error.exit_code)
    except Exception:  # noqa: BLE001  not swallowed: the error is printed and ends the process
        with suppress(OSError):  # the disk of the log may be full
            traceback.print_exc()
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
