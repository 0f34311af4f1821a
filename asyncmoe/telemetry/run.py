"""All records of a run, the input of the summary and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from asyncmoe.errors import DataError
from asyncmoe.telemetry.overlap import Interval
from asyncmoe.telemetry.records import Tail, read_evaluations, sessions, trainer_restarts
from asyncmoe.telemetry.rollout_schema import Evaluation, Rollout
from asyncmoe.telemetry.samples.records import FOLDER, ROLLOUT_SAMPLES
from asyncmoe.telemetry.schema import CONTROLLER_SPANS, EVALUATION, METRICS, ROLLOUT, TRAINER_SPANS, Span, Step, What


@dataclass(frozen=True)
class RunRecords:
    """All records of a run.

    Attributes:
        sessions: the valid steps, one list per start of the trainer (`records.sessions`).
        trainer_restarts: how often the trainer was restarted in place (`records.trainer_restarts`).
    """

    sessions: Sequence[Sequence[Step]]
    rollout: Sequence[Rollout]
    spans: Sequence[Span]
    evaluations: Sequence[Evaluation] = ()
    trainer_restarts: int = 0

    @cached_property
    def steps(self) -> list[Step]:
        """All valid steps, warm-up included."""
        return list(chain.from_iterable(self.sessions))

    @cached_property
    def rl(self) -> list[Step]:
        """The valid reinforcement-learning steps."""
        return [step for step in self.steps if step.phase == "rl"]

    @cached_property
    def rl_windows(self) -> list[Interval]:
        """RL time: for each session, the interval from the beginning of its first valid RL step to the end of its last, in Unix seconds.

        It includes time between two steps (a checkpoint). It excludes time between two sessions, and the work of a killed trainer after
        the checkpoint from which the run resumed.
        """
        rl = [[step for step in session if step.phase == "rl"] for session in self.sessions]
        return [(session[0].begin, session[-1].time) for session in rl if session]

    @cached_property
    def engines(self) -> list[str]:
        """Names of the engines with at least one span, such as "engine.0", by number."""
        names = {span.who for span in self.spans if span.who.startswith("engine.")}
        return sorted(names, key=lambda name: (len(name), name))

    @property
    def newest(self) -> float | None:
        """Time of the newest step, rollout record or evaluation, in Unix seconds; None without one."""
        records: list[Step | Rollout | Evaluation] = [*self.steps[-1:], *self.rollout[-1:], *self.evaluations[-1:]]
        return max((record.time for record in records), default=None)

    def intervals(self, what: What, who: str | None = None) -> list[Interval]:
        """Return the intervals in which `who` (None: anyone) did `what`; neither sorted nor disjoint."""
        return [(span.begin, span.end) for span in self.spans if span.what == what and who in (None, span.who)]


def load(run_dir: Path) -> RunRecords:
    """Read a run directory, even before the first step. Files may be absent, but not all of them.

    Raises:
        DataError: nothing is recorded, or a record is damaged; names file and line.
    """
    records = Tail(run_dir / METRICS).poll_steps()
    rollout = Tail(run_dir / ROLLOUT).poll_as(Rollout)
    if not (records or rollout or (run_dir / FOLDER / ROLLOUT_SAMPLES).is_file()):
        raise no_step(run_dir)
    spans = [span for name in (TRAINER_SPANS, CONTROLLER_SPANS) for span in Tail(run_dir / name).poll_as(Span)]
    evaluations = read_evaluations(run_dir / EVALUATION)
    return RunRecords(sessions(records), rollout, spans, evaluations, trainer_restarts(records))


def no_step(run_dir: Path) -> DataError:
    """Return the error for a directory without steps."""
    return DataError(str(run_dir / METRICS), got="no step", expected="at least one recorded step", hint="give the run.dir of a run")
