"""A logger's process, see `sender.follow`: `python -m asyncmoe.telemetry.loggers RUN NAME`."""

import signal
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # before the imports, which take longer than a run that fails at once
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    from asyncmoe.errors import AsyncmoeError
    from asyncmoe.process import leave, say
    from asyncmoe.telemetry.loggers import sender

    try:
        sender.follow(Path(sys.argv[1]), sys.argv[2], stop)
    except AsyncmoeError as error:
        say(error)
        leave(error.exit_code)  # a client's threads may still wait for a server that does not answer
    leave(0)
