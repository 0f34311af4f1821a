"""One of `asyncmoe.rollout.processes`: `python -m asyncmoe.rollout.process_worker package.module:function`.

The function is a context manager, which yields what answers a request. Each message is a line of JSON. First input: the function's keyword
arguments; first output: "", or why it cannot be used. Then each input is a request, and each output its answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from asyncmoe.errors import UserError
from asyncmoe.process import die_with_parent


def main(serve: str) -> None:
    """Answer until standard input ends.

    Prints of the function go to standard error, and its standard input is empty, so that neither it nor a process that it starts takes a
    request. A process that it has forked and that comes back ends without an answer.
    """
    die_with_parent()
    requests, answers, own = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1), os.getpid()
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    module, _, name = serve.partition(":")
    try:
        with getattr(importlib.import_module(module), name)(**json.loads(requests.readline())) as answer:
            print(json.dumps(""), file=answers)
            for line in requests:
                answered = answer(json.loads(line))
                if os.getpid() != own:
                    os._exit(0)
                print(json.dumps(answered), file=answers)
    except UserError as error:
        print(json.dumps(str(error)), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
