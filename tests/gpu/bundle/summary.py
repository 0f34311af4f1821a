"""What a run of the bundle found, as it is written to summary.json. Only the standard library is imported here.

    {"schema": 1, "date": "2026-11-22", "commit": "...", "limit_seconds": 535, "seconds": 402.1,
     "machine": {"card": "NVIDIA H200", "driver": ..., "cuda": ..., "torch": ..., "nccl": ..., "python": ..., "cores": ...},
     "parts": {"kernels": {"status": "ok", "reason": "", "seconds": 31.0, "limit_seconds": 70,
                           "figures": {"passed": {"value": 61, "unit": "tests"}}}}}

Documentation cites a figure by its place, e.g. `parts.bench.figures.pack_share.value`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
MACHINE = ("card", "driver", "cuda", "torch", "nccl", "python", "cores")
"""Keys of "machine"; a value is null where the machine has no such thing."""

Status = Literal["ok", "failed", "skipped"]
Figures = dict[str, "Figure"]


@dataclass(frozen=True)
class Figure:
    """A measured number, or a word, and its unit ("" for a pure number)."""

    value: float | int | str | bool | None
    unit: str = ""


@dataclass(frozen=True)
class Outcome:
    """How a part ended. reason: why it was skipped or failed, in one line."""

    status: Status
    reason: str = ""
    seconds: float = 0.0
    limit_seconds: float = 0.0
    figures: Figures = field(default_factory=dict)


@dataclass
class Summary:
    """All of a run, so far."""

    date: str
    commit: str
    limit_seconds: float
    seconds: float = 0.0
    machine: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(MACHINE))
    parts: dict[str, Outcome] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Replace the file, whole or not at all."""
        part = file.with_suffix(".tmp")
        part.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n")
        part.replace(file)


def read_outcome(file: Path) -> tuple[str, Figures]:
    """What a part wrote: {"skipped": reason or "", "figures": {name: {"value", "unit"}}}; nothing where it wrote nothing."""
    if not file.exists():
        return "", {}
    found = json.loads(file.read_text())
    return found.get("skipped", ""), {name: Figure(**figure) for name, figure in found.get("figures", {}).items()}


def write_outcome(file: Path, figures: Mapping[str, tuple[Any, str]], skipped: str = "") -> None:
    """A part's own result; figures: name -> (value, unit)."""
    file.write_text(
        json.dumps({"skipped": skipped, "figures": {name: {"value": value, "unit": unit} for name, (value, unit) in figures.items()}})
    )


def problems(found: Any) -> list[str]:
    """What of a parsed summary.json is not as the schema says; empty when all is."""
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        return [f"schema: expected {SCHEMA}"]
    wrong = [f"{key}: missing" for key in ("date", "commit", "limit_seconds", "seconds", "machine", "parts") if key not in found]
    if wrong:
        return wrong
    wrong += [f"machine.{key}: missing" for key in MACHINE if key not in found["machine"]]
    for name, part in found["parts"].items():
        if part.get("status") not in ("ok", "failed", "skipped"):
            wrong.append(f"parts.{name}.status: got {part.get('status')!r}")
        if part.get("status") != "ok" and not part.get("reason"):
            wrong.append(f"parts.{name}.reason: empty, though {part.get('status')}")
        for figure, value in part.get("figures", {}).items():
            if set(value) != {"value", "unit"}:
                wrong.append(f"parts.{name}.figures.{figure}: expected value and unit")
    return wrong
