"""A process that runs a tool's function: `python -m asyncmoe.rollout.episodes.tools.function_worker package.module:function`.

Each message is one JSON line. Input: the argument. Output: {"text": return value} or {"error": text, "reason": `ToolError.reason`};
the first output, once the function is imported, is {"text": ""}.
"""

from __future__ import annotations

import json
import sys

from asyncmoe.rollout import piped
from asyncmoe.rollout.episodes.tools.signature import Arguments, find
from asyncmoe.rollout.episodes.tools.tool import ERROR, ToolError


def main(target: str) -> None:
    """Answer until standard input ends."""
    requests, say = piped.take()
    arguments = Arguments(find(target), target)
    say({"text": ""})
    for line in requests:
        try:
            text = arguments.call(json.loads(line))
            answer = {"text": text if isinstance(text, str) else None}
        except ToolError as error:
            answer = {"error": error.detail, "reason": error.reason}
        except BaseException as error:  # noqa: BLE001  any exception of a user's function is reported to the controller
            answer = {"error": f"error: {type(error).__name__}: {error}", "reason": ERROR}
        say(answer)


if __name__ == "__main__":
    main(sys.argv[1])
