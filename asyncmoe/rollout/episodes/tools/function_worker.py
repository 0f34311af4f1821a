"""A process that runs a tool's function: `python -m asyncmoe.rollout.episodes.tools.function_worker package.module:function`.

Each message is one JSON line. Input: the argument. Output: {"text": return value} or {"error": text, "reason": `ToolError.reason`};
the first output, once the function is imported, is {"text": ""}. Anything the function prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys

from asyncmoe.process import die_with_parent
from asyncmoe.rollout.episodes.tools.signature import Arguments, find
from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError


def main(target: str) -> None:
    """Answer until standard input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    arguments = Arguments(find(target), target)
    print(json.dumps({"text": ""}), file=answers)
    for line in sys.stdin:
        try:
            text = arguments.call(json.loads(line))
            answer = json.dumps({"text": text if isinstance(text, str) else None})
        except ToolError as error:
            answer = json.dumps({"error": error.detail, "reason": error.reason})
        except BaseException as error:  # noqa: BLE001  any exception of a user's function is reported to the controller
            answer = json.dumps({"error": f"error: {type(error).__name__}: {error}", "reason": ERROR})
        print(answer, file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
