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
from asyncmoe.telemetry.gauges import Gauges, gauge, mean
from asyncmoe.telemetry.metric import Metric, declared
from asyncmoe.telemetry.rejected import describe, evaluated, rejected
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.schema import Step

RECENT_STEPS = 10
RECENT_ROLLOUTS = 30
_LABEL = 9
_MOST_TOOLS = 3


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
    trainer_restarts: int = 0
    resumed_at: int = 0
    """Steps that the trainer's newest start began with."""

    @property
    def done(self) -> int:
        return self.steps[-1].step if self.steps else self.resumed_at

    @property
    def recent(self) -> Gauges:
        """Gauges of the last few RL steps and rollout records."""
        return gauge(self.recent_rl, self.rollout[-RECENT_ROLLOUTS:])

    @property
    def recent_rl(self) -> list[Step]:
        """The RL steps among the last few steps."""
        return [step for step in self.steps[-RECENT_STEPS:] if step.phase == "rl"]


def remaining_seconds(view: View) -> float | None:
    """Estimate the remaining time: remaining steps times the median duration of recent RL steps; None without a recent RL step."""
    seconds = view.recent.step_seconds
    return None if seconds is None else seconds * (view.total - view.done)


def heading(view: View) -> str:
    """Describe name and progress: "demo · step 7 of 100 · version 37", "demo · warm-up 3 of 30"."""
    if not view.steps:
        return f"{view.name} · starting"
    last = view.steps[-1]
    if last.phase == "warmup":
        return f"{view.name} · warm-up {last.step} of {view.warmup}"
    version = f" · version {last.version}" if last.version is not None else ""
    return f"{view.name} · step {last.step - view.warmup} of {view.total - view.warmup}{version}"


def panel(view: View) -> RenderableType:
    """Render the whole view; fits 80 columns, longer lines are folded."""
    g = view.recent
    rows = {
        "learning": "   ".join(f"{metric.word} {text}" for metric, text in _learning(view)),
        "speed": f"{number(g.trained_per_s)} tokens/s trained   {number(g.generated_per_s)} sampled   {duration(g.step_seconds)} a step",
        "queue": f"depth {number(g.queue_depth)}   in flight {number(g.running)}",
        "age": shares(g.ages),
        "idle": f"trainer {percent(g.trainer_idle)}   engines {percent(g.engine_idle)}",
        "sync": f"{number(g.sync_seconds, 's')} an update   engines paused {number(g.pause_ms, 'ms')}",
        **{name: describe(stage) for record in view.rollout[-1:] for name, stage in record.scoring.items()},
        "advice": advise(g)[0],
    }
    if view.rollout and (tools := _tools(view.rollout)):
        rows["tools"] = tools
    if (gone := rejected(view.rollout)).by_reason:
        rows["rejected"] = str(gone)
    if view.evaluation is not None:
        rows["evaluated"] = evaluated(view.evaluation)
    if view.trainer_restarts:
        rows["restarts"] = f"trainer {view.trainer_restarts}"
    if view.message:
        rows["note"] = view.message
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_LABEL, style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows.items():
        grid.add_row(label, Text(text, style="yellow" if label in ("advice", "note", "rejected") else ""))
    return Panel(Group(_progress(view), grid), title=Text(heading(view)), title_align="left")


def _learning(view: View) -> list[tuple[Metric, str]]:
    """Return the metrics of the panel: each is the mean over the recent RL steps, or the last step's before there is an RL step."""
    steps = view.recent_rl or view.steps[-1:]
    shown = {name: metric for name, metric in declared(Step).items() if metric.panel}
    return [(metric, quantity(mean([getattr(step, name) for step in steps]), metric.unit)) for name, metric in shown.items()]


def _tools(records: Sequence[Rollout]) -> str:
    """Describe the tools whose calls took the longest time together."""
    used = [
        (tool.seconds, f"{name} {number(tool.seconds / tool.calls, 's')} a call") for name, tool in records[-1].tools.items() if tool.calls
    ]
    return "   ".join(text for _, text in sorted(used, reverse=True)[:_MOST_TOOLS])


def _progress(view: View) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(width=_LABEL, style="dim")
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    eta = remaining_seconds(view)
    left = "" if eta is None else f"{duration(eta)} left"
    row.add_row(
        "steps",
        ProgressBar(total=max(view.total, 1), completed=view.done, complete_style="green"),
        f"{percent(view.done / max(view.total, 1))}  {left}",
    )
    return row


def line(view: View, step: Step) -> str:
    """Describe one step in one line of plain text, without missing values."""
    phase = f"warm-up {step.step}/{view.warmup}" if step.phase == "warmup" else f"step {step.step - view.warmup}/{view.total - view.warmup}"
    parts = [(metric.word, quantity(getattr(step, name), metric.unit)) for name, metric in declared(Step).items() if metric.word]
    gone = rejected(view.rollout)
    lost = [f"rejected {percent(gone.share)}"] if gone.by_reason else []
    return "  ".join([phase, *(f"{word} {text}" for word, text in parts if text != ABSENT), *lost])
