"""A process that scores: `python -m asyncmoe.rollout.score_worker package.module:function`, a JSON line in, a JSON line out.

In: [prompt, response, answer]. Out: {"value": number} or {"error": text}; first, once the function is imported, {"value": null}.
What the function prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys

from asyncmoe.process import die_with_parent
from asyncmoe.rollout.scoring import find, number


def main(target: str) -> None:
    """Answer until standard input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    function = find(target)
    print(json.dumps({"value": None}), file=answers)
    for line in sys.stdin:
        try:
            answer = json.dumps({"value": number(function(*json.loads(line)))})
        except Exception as error:  # noqa: BLE001  whatever a user's function raises is told to the controller
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(answer, file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
