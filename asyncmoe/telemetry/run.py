"""A run's records, read whole: what the summary and the report are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from asyncmoe.errors import DataError
from asyncmoe.telemetry.overlap import Interval
from asyncmoe.telemetry.records import read_evaluations, read_rollout, read_sessions, read_spans
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, EVALUATION, METRICS, ROLLOUT, TRAINER_SPANS, Evaluation, Rollout, Span, Step, What


@dataclass(frozen=True)
class RunRecords:
    """Everything a run recorded. `sessions`: the steps that count, one list for each start of the trainer."""

    name: str
    sessions: Sequence[Sequence[Step]]
    rollout: Sequence[Rollout]
    spans: Sequence[Span]
    evaluations: Sequence[Evaluation] = ()

    @cached_property
    def steps(self) -> list[Step]:
        """All steps that count, warm-up included."""
        return list(chain.from_iterable(self.sessions))

    @cached_property
    def rl(self) -> list[Step]:
        """The reinforcement-learning steps that count."""
        return [step for step in self.steps if step.phase == "rl"]

    @cached_property
    def rl_windows(self) -> list[Interval]:
        """RL time: for each session, from the beginning of its first RL step that counts to the end of its last, in Unix seconds.

        What lies between two steps (a checkpoint) is inside; the time between two sessions, and what a killed trainer did after
        the checkpoint it was resumed from, is outside.
        """
        rl = [[step for step in session if step.phase == "rl"] for session in self.sessions]
        return [(session[0].begin, session[-1].time) for session in rl if session]

    @cached_property
    def windows(self) -> list[Interval]:
        """As `rl_windows`, warm-up included."""
        return [(session[0].begin, session[-1].time) for session in self.sessions]

    @cached_property
    def engines(self) -> list[str]:
        """Names of the engines that left a span, as "engine.0", in order of their number."""
        names = {span.who for span in self.spans if span.who.startswith("engine.")}
        return sorted(names, key=lambda name: (len(name), name))

    def intervals(self, what: What, who: str | None = None) -> list[Interval]:
        """When `who` (None: anyone) did `what`; as recorded, neither sorted nor disjoint."""
        return [(span.begin, span.end) for span in self.spans if span.what == what and who in (None, span.who)]


def load(run_dir: Path) -> RunRecords:
    """Read a run directory. Files other than metrics.jsonl may be absent.

    Raises:
        DataError: no step was recorded, or a broken line (see `records.read_spans`).
    """
    found = read_sessions(run_dir / METRICS)
    if not found:
        raise DataError(str(run_dir / METRICS), got="no step", expected="at least one recorded step", cure="give the run.dir of a run")
    spans = read_spans(run_dir / TRAINER_SPANS) + read_spans(run_dir / CONTROLLER_SPANS)
    return RunRecords(run_dir.resolve().name, found, read_rollout(run_dir / ROLLOUT), spans, read_evaluations(run_dir / EVALUATION))
