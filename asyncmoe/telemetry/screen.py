"""The content of the live view, as a pure function of the records read so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncmoe.telemetry.advice import advise
from asyncmoe.telemetry.format import ABSENT, duration, number, percent, quantity, shares
from asyncmoe.telemetry.gauges import gauge, mean
from asyncmoe.telemetry.metric import declared
from asyncmoe.telemetry.rejected import describe, evaluated, rejected
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Step

RECENT_STEPS = 10
RECENT_ROLLOUTS = 30
_LABEL = 9


@dataclass(frozen=True)
class View:
    """What is shown of the records read so far; `total` and `warmup` come from the configuration."""

    name: str
    warmup: int
    total: int
    """Optimizer steps of the whole run, warm-up included."""
    steps: Sequence[Step] = ()
    """Valid steps, oldest first; only the last `RECENT_STEPS` are looked at."""
    rollout: Sequence[Rollout] = ()
    message: str = ""
    evaluation: Evaluation | None = None
    """The latest evaluation."""


def heading(view: View) -> str:
    """Describe name and progress: "demo · step 7 of 100 · version 37", "demo · warm-up 3 of 30"."""
    if not view.steps:
        return f"{view.name} · starting"
    last = view.steps[-1]
    version = f" · version {last.version}" if last.version is not None else ""
    return f"{view.name} · {_place(view, last, ' of ')}{version}"


def _place(view: View, step: Step, of: str) -> str:
    if step.phase == "warmup":
        return f"warm-up {step.step}{of}{view.warmup}"
    return f"step {step.step - view.warmup}{of}{view.total - view.warmup}"


def panel(view: View) -> RenderableType:
    """Render the whole view; fits 80 columns, longer lines are folded."""
    rl = [step for step in view.steps[-RECENT_STEPS:] if step.phase == "rl"]
    g = gauge(rl, view.rollout[-RECENT_ROLLOUTS:])
    learning = [
        f"{metric.word} {quantity(mean([getattr(step, name) for step in rl or view.steps[-1:]]), metric.unit)}"
        for name, metric in declared(Step).items()
        if metric.panel
    ]
    rows = {
        "learning": "   ".join(learning),
        "speed": f"{number(g.trained_per_s)} tokens/s trained   {number(g.generated_per_s)} sampled   {duration(g.step_seconds)} a step",
        "queue": f"depth {number(g.queue_depth)}   in flight {number(g.running)}",
        "age": shares(g.ages),
        "idle": f"trainer {percent(g.trainer_idle)}   engines {percent(g.engine_idle)}",
        "sync": f"{number(g.sync_seconds, 's')} an update   engines paused {number(g.pause_ms, 'ms')}",
        **{name: describe(stage) for record in view.rollout[-1:] for name, stage in record.scoring.items()},
        "advice": advise(g)[0],
        "rejected": rejected(view.rollout),
        "evaluated": "" if view.evaluation is None else evaluated(view.evaluation),
        "note": view.message,
    }
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_LABEL, style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows.items():
        if text:
            grid.add_row(label, Text(text, style="yellow" if label in ("advice", "note", "rejected") else ""))
    return Panel(Group(_progress(view, g.step_seconds), grid), title=Text(heading(view)), title_align="left")


def _progress(view: View, step_seconds: float | None) -> RenderableType:
    """Render the progress, with an estimate of the remaining time: the remaining steps, each as long as the recent ones."""
    done = view.steps[-1].step if view.steps else 0
    left = "" if step_seconds is None else f"{duration(step_seconds * (view.total - done))} left"
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(width=_LABEL, style="dim")
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row("steps", ProgressBar(total=max(view.total, 1), completed=done), f"{percent(done / max(view.total, 1))}  {left}")
    return row


def line(view: View, step: Step) -> str:
    """Describe one step in one line of plain text, without missing values."""
    parts = [(metric.word, quantity(getattr(step, name), metric.unit)) for name, metric in declared(Step).items() if metric.word]
    return "  ".join([_place(view, step, "/"), *(f"{word} {text}" for word, text in parts if text != ABSENT)])
