"""The report of a run: one HTML file without external assets, readable offline."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from asyncmoe.telemetry import figures, timeline
from asyncmoe.telemetry.advice import advise
from asyncmoe.telemetry.format import duration, number, percent
from asyncmoe.telemetry.gauges import gauge
from asyncmoe.telemetry.rejected import describe, rejected, scored
from asyncmoe.telemetry.rollout_schema import Evaluation
from asyncmoe.telemetry.run import RunRecords, load
from asyncmoe.telemetry.summary import Summary, summary_of

Draw = Callable[[RunRecords], figures.Picture | None]

_SECTIONS: tuple[tuple[str, str, tuple[Draw | str, ...]], ...] = (
    (
        "Timeline",
        "A run that overlaps keeps its engines generating (green) while the trainer trains (blue). Purple: engines paused for new weights.",
        (timeline.recent, timeline.whole),
    ),
    ("Learning", "", ("Mean reward", "Evaluation", "Policy loss", "Gradient norm", figures.warmup_loss)),
    ("Staleness", "Age: the trainer's version minus the version that sampled the token.", ()),
    (
        "Agreement of engines and trainer",
        "How far apart the two are in what they make of the same tokens. Where routing is kept, tokens that the trainer's router would "
        "have sent elsewhere are trained through the experts that sampled them.",
        (),
    ),
    ("Idle time and queue", "Who waits for whom.", (figures.idle,)),
    ("Weight updates", "", ()),
    ("Throughput", "", ()),
)
"""Title, note, and the figures that come first: functions, or titles of declared figures. The section's other declared figures follow."""

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 2.2rem 0 .3rem; font-size: 1.15rem; border-bottom: 1px solid #d8dee4; }
p { margin: .3rem 0; }
.note { color: #59636e; }
.advice { background: #fff8e6; border-left: 4px solid #E69F00; padding: .5rem 1rem; margin: 1.2rem 0; }
.advice ul { margin: 0; padding-left: 1.1rem; }
table { border-collapse: collapse; width: 100%; }
td { padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #eff2f5; vertical-align: top; }
td:nth-child(2) { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; font-weight: 600; }
td:nth-child(3) { color: #59636e; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: .8rem; }
.plots.wide { grid-template-columns: 1fr; }
img { width: 100%; height: auto; }
"""


def report(run_dir: Path) -> Path:
    """Write run_dir/report.html atomically from the records so far. Works during the run.

    Raises:
        DataError: no step is recorded, or a line is malformed (see `records.read_spans`).
    """
    page = html(load(run_dir))
    target = run_dir / "report.html"
    part = run_dir / f".report.html.{os.getpid()}"
    part.write_text(page, encoding="utf-8")
    part.replace(target)
    return target


def html(run: RunRecords) -> str:
    """Render the page."""
    summary = summary_of(run)
    sections = "".join(_section(title, note, _drawn(run, title, first)) for title, note, first in _SECTIONS)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(run.name)} · asyncmoe</title><style>{_CSS}</style></head><body>\n"
        f'<h1>{escape(run.name)}</h1>\n<p class="note">{escape(_what_it_was(run, summary))}</p>\n'
        f"{_advice(run, summary)}{_table(run, summary)}{sections}</body></html>\n"
    )


def _drawn(run: RunRecords, section: str, first: Sequence[Draw | str]) -> list[figures.Picture | None]:
    every = [*first, *(title for title in figures.titles(section) if title not in first)]
    return [one for draw in every for one in (figures.declared_figures(run, draw) if isinstance(draw, str) else [draw(run)])]


def _what_it_was(run: RunRecords, summary: Summary) -> str:
    warmup = len(run.steps) - summary.steps
    parts = [f"{summary.steps} RL steps in {duration(summary.wall_seconds)}" if summary.steps else "no RL step yet"]
    parts += [f"after {warmup} warm-up steps"] if warmup else []
    parts += [f"{len(run.engines)} engine{'s' if len(run.engines) > 1 else ''}"] if run.engines else []
    parts += [f"started {len(run.sessions)} times"] if len(run.sessions) > 1 else []
    return " · ".join(parts)


def _advice(run: RunRecords, summary: Summary) -> str:
    gauges = replace(gauge(run.rl, run.rollout), trainer_idle=summary.trainer_idle_share, engine_idle=summary.engine_idle_share)
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in advise(gauges))
    return f'<div class="advice"><ul>{items}</ul></div>\n'


def _table(run: RunRecords, summary: Summary) -> str:
    diff = summary.max_abs_logprob_diff_same_version
    reward = f"{number(summary.reward_first)} → {number(summary.reward_last)}"
    rows = [
        ("Reward", reward, "mean of the first and of the last 5 RL steps"),
        ("Throughput", number(summary.tokens_per_s, "tokens/s"), "trained tokens, prompt and response, over RL time"),
        ("Overlap", percent(summary.overlap_share), "of the training time, at least one engine was generating"),
        ("Trainer idle", percent(summary.trainer_idle_share), "of RL time, waiting for a batch"),
        ("Engines idle", percent(summary.engine_idle_share), "of RL time, generating nothing; mean over engines"),
        ("Weight sync", number(summary.sync_seconds_median, "s"), "median of the updates"),
        ("Pause", number(summary.pause_ms_median, "ms"), "median of the updates: how long the engines stood still"),
        (
            "Oldest token",
            number(summary.max_staleness_seen, "version" if summary.max_staleness_seen == 1 else "versions"),
            "largest age trained on",
        ),
        ("Log-prob difference", number(diff, "nats", 2), "largest |trainer - engine| on tokens of the same version; – when there was none"),
        ("KL engine to trainer", number(summary.train_infer_kl_mean, "nats", 2), "a token, mean over RL steps; staleness included"),
        (
            "Routed otherwise",
            percent(summary.routing_mismatch_mean),
            "of tokens, by the trainer's router; mean over layers",
        ),
    ]
    if summary.evaluation_first is not None and summary.evaluation_last is not None:
        rows.insert(1, _evaluation(summary.evaluation_first, summary.evaluation_last))
    rows += [(f"Scoring: {name}", number(stage.scored), describe(stage)) for name, stage in scored(run.rollout).items()]
    if run.rollout:
        rows.append(("Rejected", percent(summary.rejected_share), f"trajectories: {rejected(run.rollout)}"))
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>Summary</h2>\n<table>{cells}</table>\n"


def _evaluation(first: Evaluation, last: Evaluation) -> tuple[str, str, str]:
    error = "" if last.reward_stderr is None else f" ± {number(last.reward_stderr)}"
    what = f"mean reward of versions {first.version} and {last.version}; {last.episodes} episodes, {percent(last.failed_share)} failed"
    return f"Evaluation {first.name}".strip(), f"{number(first.reward_mean)} → {number(last.reward_mean)}{error}", what


def _section(title: str, note: str, drawn: Sequence[figures.Picture | None]) -> str:
    images = "".join(_image(picture) for picture in drawn if picture is not None)
    body = (
        f'<div class="plots{" wide" if title == "Timeline" else ""}">{images}</div>' if images else '<p class="note">Nothing recorded.</p>'
    )
    intro = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<h2>{escape(title)}</h2>\n{intro}{body}\n"


def _image(picture: figures.Picture) -> str:
    # Element ids of several inline SVGs would clash; as images, they do not.
    data = base64.b64encode(picture.svg.encode()).decode()
    return f'<img alt="{escape(picture.alt)}" src="data:image/svg+xml;base64,{data}">'
