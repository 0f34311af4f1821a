"""Reads a report page's contents without a browser, and writes samples that try to break out of it."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncmoe.telemetry.records import JsonLines
from asyncmoe.telemetry.samples import records


def packed(page: str, name: str) -> bytes:
    """What the page holds under a name."""
    (found,) = re.findall(rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    return gzip.decompress(base64.b64decode(found))


def data_of(path: Path) -> list[dict[str, Any]]:
    """The runs of a page."""
    return json.loads(packed(path.read_text(), "data"))["runs"]


def groups_of(path: Path, run: int = 0) -> list[dict[str, Any]]:
    """A run's groups in a page."""
    return json.loads(packed(path.read_text(), f"groups-{run}"))


def figures_of(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Section -> title -> figure."""
    sections = json.loads(packed(path.read_text(), "data"))["sections"]
    return {part["title"]: {one["title"]: one for one in part["figures"]} for part in sections}


NASTY = ["</script>", "<img src=x onerror=alert(1)>", "\x1b[31m", "\u202egnp", "🦀", "&amp;", "\n", "{{7*7}}", "\x00"]
"""What a model may say to end a script, make an element, or change the order of text."""


def write_samples(run_dir: Path, groups: int = 2, said: Sequence[str] = NASTY) -> None:
    """Groups of two responses: one trained, with two versions, a rejected, a clipped and a capped token, a call of a tool and an
    observation; the other rejected by its scorer. The last group waits."""
    folder = run_dir / records.FOLDER
    with JsonLines(folder / records.ROLLOUT_SAMPLES, 0o600) as rollout, JsonLines(folder / records.TRAINER_SAMPLES, 0o600) as trainer:
        for lines in (rollout, trainer):
            lines.write(records.Begin(time=1.0, step=0))
        for number in range(groups):
            rollout.write(_group(number, said))
            if number < groups - 1 or groups == 1:
                states = "".join("b" if i == 0 else "c" if i == 1 else "w" if i == 2 else "." for i in range(len(said)))
                own = {"key": f"t{number}", "digest": number, "states": states}
                drift = [-0.5 + 0.1 * i for i in range(len(said))]
                values = {"logprobs": drift, "advantages": 1.0, "mismatch": [i % 3 for i in range(len(said))], "layers": 2}
                trainer.write(records.Trained(time=2.0, step=21 + number, version=20, **own, **values))  # type: ignore[arg-type]


def _group(number: int, said: Sequence[str]) -> records.SampledGroup:
    half = len(said) // 2
    first = records.SampledMember(
        key=f"t{number}",
        episode=0,
        shared=True,
        rest=records.Stretch(tokens=[*range(len(said) + 1)], pieces=[*said, "42 is what the tool says"]),
        roles=[("prompt", 2), ("response", len(said)), ("observation", 1)],
        logprobs=[-0.5] * len(said),
        versions=[(19, half), (20, len(said) - half)],
        finish="stop",
        reward=1.0,
        calls=[records.ToolCall(name="add</script>", argument="1\x07", observation="<b>42</b>", seconds=0.25)],
        digest=number,
        why="the answer is <i>right</i>",
    )
    second = records.SampledMember(key=f"u{number}", episode=1, shared=True, roles=[("prompt", 2)], failure="scorer_error: 1/0 </script>")
    prompt = records.Stretch(tokens=[7, 8], pieces=["What is ", "6*7?</script>"])
    return records.SampledGroup(
        time=1.5, group=number, fate="queued", version=20, question="6*7", answer="42", prompt=prompt, members=[first, second]
    )
