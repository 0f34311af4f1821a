"""The report's figures. Each function returns SVG, or None if there is no data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asyncmoe.telemetry import series
from asyncmoe.telemetry.format import percent
from asyncmoe.telemetry.run import RunRecords
from asyncmoe.telemetry.series import Series

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, GREEN, ORANGE, RED, PURPLE, GREY = "#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#C9CED6"
INK, FAINT = "#30363d", "#e6e9ed"

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "asyncmoe",
}
_PATH = re.compile(r'\bd="[^"]*"')
_DECIMALS = re.compile(r"(\.\d\d)\d+")

Curve = tuple[str, Series, str]
"""Label, points, colour."""


def reward(run: RunRecords) -> str | None:
    """Mean reward of each RL step, with its running mean."""
    return _smoothed("Mean reward", "reward", series.by_step(run, lambda step: step.reward_mean), BLUE)


def evaluation(run: RunRecords) -> str | None:
    """Mean reward of each evaluation."""
    return _curves("Evaluation", "reward", [("", series.evaluation(run), GREEN)])


def loss(run: RunRecords) -> str | None:
    """Loss of each RL step, with its running mean."""
    return _smoothed("Policy loss", "loss", series.by_step(run, lambda step: step.loss), RED)


def warmup_loss(run: RunRecords) -> str | None:
    """Loss of the supervised warm-up."""
    return _curves("Warm-up loss", "loss", [("", series.warmup_loss(run), PURPLE)], x="warm-up step")


def grad_norm(run: RunRecords) -> str | None:
    """Gradient norm before clipping."""
    return _curves("Gradient norm", "norm", [("", series.by_step(run, lambda step: step.grad_norm), PURPLE)])


def age_histogram(run: RunRecords) -> str | None:
    """Sampled tokens by age."""
    counts = series.ages(run)
    if not counts:
        return None
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes("Age of the trained tokens", "age in versions", "share of tokens, %")
        shares = [count / sum(counts.values()) for count in counts.values()]
        bars = axes.bar(list(counts), [100 * share for share in shares], color=BLUE, width=0.7)
        if len(counts) <= 12:
            axes.bar_label(bars, labels=[percent(share) for share in shares], fontsize=8, padding=2)
        axes.set_ylim(0, 112 * max(shares))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        return svg(figure)


def staleness(run: RunRecords) -> str | None:
    """Mean and largest token age in each step's batch."""
    mean = series.by_step(run, lambda step: step.staleness_mean)
    most = series.by_step(run, lambda step: step.staleness_max)
    return _curves("Age in each batch", "versions", [("oldest token", most, ORANGE), ("mean", mean, BLUE)], floor=0)


def train_infer_kl(run: RunRecords) -> str | None:
    """KL divergence between the sampling engines and the trainer."""
    points = series.by_step(run, lambda step: step.train_infer_kl)
    return _curves("KL(engine ‖ trainer)", "nats a token", [("", points, PURPLE)], floor=0)


def kl_reference(run: RunRecords) -> str | None:
    """KL divergence between the trainer and the initial policy."""
    points = series.by_step(run, lambda step: step.kl_reference)
    return _curves("KL(trainer ‖ reference)", "nats a token", [("", points, PURPLE)], floor=0)


def routing_mismatch(run: RunRecords) -> str | None:
    """Share of tokens, by layer, that the trainer's router would have sent to other experts."""
    shares = series.routing_mismatch(run)
    if not shares:
        return None
    with style():
        figure, axes = _axes("Tokens the trainer's router would send elsewhere", "layer", "share of tokens, %")
        axes.bar(list(shares), [100 * share for share in shares.values()], color=ORANGE, width=0.7)
        axes.set_ylim(0, max(112 * max(shares.values()), 1e-3))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        return svg(figure)


def ratio_quantiles(run: RunRecords) -> str | None:
    """Quantiles of the importance ratio in each step."""
    shares = sorted({share for step in run.rl for share in (step.ratio_quantiles or {})}, key=float)
    colours = (GREY, BLUE, GREEN, ORANGE, RED)
    curves = [
        (share, series.by_step(run, lambda step, share=share: (step.ratio_quantiles or {}).get(share)), colours[i % len(colours)])  # type: ignore[misc]
        for i, share in enumerate(shares)
    ]
    return _curves("Importance ratio, quantiles", "trainer / engine", curves)


def rejected(run: RunRecords) -> str | None:
    """Share of tokens that each correction rule excludes from the loss."""
    rules = sorted({rule for step in run.rl for rule in (step.rejected_by_rule or {})})
    colours = (BLUE, GREEN, ORANGE, RED, PURPLE)
    curves = [
        (rule, series.by_step(run, lambda step, rule=rule: 100 * (step.rejected_by_rule or {}).get(rule, 0.0)), colours[i % len(colours)])  # type: ignore[misc]
        for i, rule in enumerate(rules)
    ]
    return _curves("Rejected tokens", "share of tokens, %", curves, floor=0)


def queue_depth(run: RunRecords) -> str | None:
    """Queued trajectories, and trajectories in flight, over time."""
    depth, running = series.over_minutes(run, "queue_depth"), series.over_minutes(run, "running")
    return _curves("Queue", "trajectories", [("in flight", running, GREY), ("queued", depth, BLUE)], x="minutes of RL", floor=0)


def idle(run: RunRecords) -> str | None:
    """Idle share of trainer and engines in each step."""
    curves = [("trainer", series.by_step(run, series.trainer_idle), BLUE), ("engines", series.engine_idle(run), GREEN)]
    return _curves("Idle", "share of the step, %", curves, floor=0, ceiling=100)


def sync_seconds(run: RunRecords) -> str | None:
    """Duration of each weight sync."""
    return _curves("Weight sync", "seconds", [("", series.by_step(run, lambda step: step.sync_seconds or None), RED)], floor=0)


def pause_ms(run: RunRecords) -> str | None:
    """Longest engine pause in each update."""
    points = series.by_step(run, lambda step: step.pause_ms if step.sync_seconds else None)
    return _curves("Engines' pause for an update", "milliseconds", [("", points, RED)], floor=0)


def tokens_per_s(run: RunRecords) -> str | None:
    """Trained tokens per second in each step."""
    return _curves("Trained tokens", "tokens/s", [("", series.by_step(run, series.trained_per_s), BLUE)], floor=0)


def generated_per_s(run: RunRecords) -> str | None:
    """Sampled tokens per second over time."""
    return _curves("Sampled tokens", "tokens/s", [("", series.over_minutes(run, "tokens_per_s"), GREEN)], x="minutes of RL", floor=0)


def svg(figure: Any) -> str:
    """Render a figure as SVG text, deterministically, with path coordinates truncated to a hundredth of a point."""
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return _PATH.sub(lambda path: _DECIMALS.sub(r"\1", path.group()), file.getvalue().decode())


def style() -> Any:
    """Return a context manager with the style of all figures."""
    return matplotlib.rc_context(_STYLE)


def _smoothed(title: str, unit: str, points: Series, colour: str) -> str | None:
    if len(points.y) < 8:
        return _curves(title, unit, [("", points, colour)])
    return _curves(title, unit, [("each step", points, GREY), ("running mean", points.smooth(), colour)])


def _curves(
    title: str, unit: str, curves: Sequence[Curve], *, x: str = "RL step", floor: float | None = None, ceiling: float | None = None
) -> str | None:
    curves = [curve for curve in curves if curve[1].y]
    if not curves:
        return None
    with style():
        figure, axes = _axes(title, x, unit)
        for label, points, colour in curves:
            marker = "o" if len(points.y) <= 30 else ""
            axes.plot(points.x, points.y, color=colour, linewidth=1.4, marker=marker, markersize=3, label=label)
        _limits(axes, curves, floor, ceiling)
        if x != "minutes of RL":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        if len(curves) > 1:
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(curves), borderaxespad=0.2)
        return svg(figure)


def _limits(axes: Any, curves: Sequence[Curve], floor: float | None, ceiling: float | None) -> None:
    top = max(max(points.y) for _, points, _ in curves)
    if ceiling is not None:
        # Margin that keeps a curve along the border visible.
        axes.set_ylim((floor or 0) - 2, ceiling + 2)
    elif floor is not None:
        axes.set_ylim(floor - 0.02 * (top or 1), 1.08 * top if top > 0 else 1)


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    figure = Figure(figsize=(5.4, 2.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y")
    return figure, axes
