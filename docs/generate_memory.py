"""Write the tables of docs/guides/memory.md from `asyncmoe.plan`. `PYTHONPATH=. python docs/generate_memory.py`; a test compares them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncmoe.models import MegatronParallel
from asyncmoe.plan import memory, savings
from asyncmoe.plan.activations import Microbatch
from asyncmoe.plan.memory import Training
from asyncmoe.plan.sizes import trainer_text
from benchmarks.published import REAL

OUT = Path(__file__).parent / "guides" / "memory.md"
BEGIN, END = "<!-- tables: made by docs/generate_memory.py -->\n", "<!-- end of tables -->\n"
ROWS = 8192
PARTS = ("weights", "gradients", "optimizer", "activations", "working set", "weight sync")


@dataclass(frozen=True)
class Plan:
    """A trainer that is planned for."""

    model: str
    nodes: int
    gpu_gb: float
    parallel: MegatronParallel


PLANS = (
    Plan("Qwen3-30B-A3B", 1, 80.0, MegatronParallel(tp=4, ep=8, dp=2)),
    Plan("Qwen3-30B-A3B", 1, 141.0, MegatronParallel(tp=2, ep=8, dp=4)),
    Plan("Qwen3-235B-A22B", 4, 80.0, MegatronParallel(tp=4, pp=4, ep=8, dp=2, first_layers=23, last_layers=23)),
    Plan("Qwen3-235B-A22B", 4, 141.0, MegatronParallel(tp=2, pp=4, ep=8, dp=4, first_layers=23, last_layers=23)),
    Plan("DeepSeek-V3", 8, 80.0, MegatronParallel(tp=8, pp=8, etp=8, first_layers=6, last_layers=7)),
    Plan("DeepSeek-V3", 5, 141.0, MegatronParallel(tp=8, pp=5, etp=8, first_layers=11, last_layers=11)),
)


def tables() -> str:
    """Return the text between the marks."""
    return "\n".join((*_settings(), "", *_bytes(), ""))


def _settings() -> Iterator[str]:
    yield "| model | 8-GPU nodes | GPU | `--trainer` | the cheapest settings with room |"
    yield "|---|---|---|---|---|"
    for plan in PLANS:
        keys = " ".join(f"`{key}`" for key in found(plan).keys) or "the defaults"
        yield f"| {plan.model} | {plan.nodes} | {plan.gpu_gb:g} GB | `{trainer_text(plan.parallel)}` | {keys} |"


def _bytes() -> Iterator[str]:
    yield f"| GB of a GPU | {' | '.join(PARTS)} | in all | planned for | in host memory, for this GPU |"
    yield f"|---|{'---|' * (len(PARTS) + 3)}"
    for plan in PLANS:
        way = found(plan)
        parts = (f"{way.memory.parts.get(name, 0) / 1e9:.1f}" for name in PARTS)
        name = f"{plan.model}, {plan.nodes} x 8 x {plan.gpu_gb:g}"
        room = memory.usable(plan.gpu_gb) / 1e9
        yield f"| {name} | {' | '.join(parts)} | {way.memory.total / 1e9:.1f} | {room:.1f} | {way.host_bytes / 1e9:.1f} |"


@cache
def found(plan: Plan) -> savings.Savings:
    """Return the cheapest settings of a plan that has some."""
    way = savings.cheapest(REAL[plan.model], plan.parallel, Training(Microbatch(ROWS, recompute=False)), plan.gpu_gb)
    assert way is not None
    return way


def page(text: str) -> str:
    """Return the guide with its tables."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + tables() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    OUT.write_text(page(OUT.read_text()))
