"""Main program of a process of `asyncmoe.rollout.processes`: `python -m asyncmoe.rollout.process_worker package.module:function`.

The function is a context manager that yields a function from request to answer. Each message is a line of JSON. First input: the function's
keyword arguments; first output: "", or why the function cannot be used. After that, each input is a request and each output its answer.
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

    The function's output goes to standard error, and its standard input is empty, so that neither it nor a process it starts reads a
    request. If the function forks, a child that returns from it exits without an answer.
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
