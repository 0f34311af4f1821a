"""The restart rule: what follows the loss of a part of a run, on one machine, SLURM and Ray. Decisions only.

A trainer or an engine is restarted alone. A controller that hangs or was ended by a signal is restarted with the trainer, while engines
wait for it. A controller or engine that ends with a reason ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncmoe.config import Config
from asyncmoe.errors import RECURRING

CONTROLLER, TRAINER = "controller", "trainer"
How = Literal["lost", "used up", "said"]
"""How a part ended. lost: a signal ended it, or it hangs; used up: an engine lost its server too often; said: it gave a reason."""
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
"""Seconds before the second restart in a row, doubled for each later restart, and the longest such wait; the first restart is immediate."""


@dataclass(frozen=True)
class LossRule:
    """Consequences of losing a part.

    Attributes:
        most: maximum failures in a row after which the part restarts; 0: its loss ends the run.
        key: the key that sets `most`.
        bar: why the part cannot restart, whatever `most` is; empty if it can.
        brings: parts that restart with it.
        only_lost: it does not restart if it gave a reason for its end.
        spare: the run continues without it as long as another spare part runs.
    """

    most: int
    key: str
    bar: str = ""
    brings: tuple[str, ...] = ()
    only_lost: bool = False
    spare: bool = False


@dataclass(frozen=True)
class Failure:
    """Parts that failed together.

    Attributes:
        ended: how each part that failed or hangs ended.
        why: the root cause, in words.
        exit_code: exit code of the root cause.
        step: highest step ever trained.
    """

    ended: Mapping[str, How]
    why: str
    exit_code: int = 1
    step: int = 0


@dataclass(frozen=True)
class StartAgain:
    """Restart `parts`, of which the first was lost, after `after_s` seconds. `row`: that part's failures in a row, of at most `most`."""

    parts: tuple[str, ...]
    after_s: float
    row: int
    most: int


@dataclass(frozen=True)
class LetGo:
    """Continue without a part."""

    part: str


@dataclass(frozen=True)
class EndRun:
    """End the run. `why`: addition to the root cause; may be empty."""

    why: str = ""


def table(config: Config, engines: Sequence[str], *, spare: bool = False) -> dict[str, LossRule]:
    """Return the rule of each part of a run, in the order in which the parts start.

    Args:
        engines: names of the engine processes that the launcher starts.
        spare: the run continues without an engine that is used up; False: the launcher restarts the whole run elsewhere.
    """
    needs = "the controller starts again only with sync.method reshard, and engines.orphan_s above 0"
    alone = "" if config.survives_controller else needs
    engine = LossRule(config.engines.restarts, "engines.restarts", only_lost=True, spare=spare and config.engines.nodes == 1)
    return {
        CONTROLLER: LossRule(config.run.controller_restarts, "run.controller_restarts", alone, (TRAINER,), only_lost=True),
        **dict.fromkeys(engines, engine),
        TRAINER: LossRule(config.trainer.max_restarts, "trainer.max_restarts"),
    }


def decide(
    rules: Mapping[str, LossRule], failure: Failure, history: Sequence[Failure], stopping: bool = False
) -> StartAgain | LetGo | EndRun:
    """Decide what follows a failure.

    A start counts as a failure in a row unless it trains a step that no earlier start had reached.

    Args:
        rules: rules of the parts that the run still has.
        history: failures that have led to a restart so far, oldest first.
        stopping: the user has asked the run to stop.
    """
    part = first_lost(rules, failure)
    if part is None:
        return EndRun()
    loss = rules[part]
    others = [name for name, other in rules.items() if other.spare and name not in failure.ended]
    last = LetGo(part) if loss.spare and (others or stopping) else None
    if stopping or failure.exit_code in RECURRING or not loss.most or failure.ended[part] == "used up":
        return last or EndRun()
    if loss.bar:
        return EndRun(loss.bar)
    row = in_a_row([*(one for one in history if first_lost(rules, one) == part), failure])
    if row > loss.most:
        return last or EndRun(f"{titled(part)} was lost {row} times without a new step; {loss.key} is {loss.most}")
    wait_s = 0.0 if row == 1 else FIRST_WAIT_S * 2.0 ** min(row - 2, 30)
    return StartAgain((part, *loss.brings), min(wait_s, LONGEST_WAIT_S), row, loss.most)


def titled(part: str) -> str:
    """Return a part's name in messages."""
    return f"the {part}" if part in (CONTROLLER, TRAINER) else part


def first_lost(rules: Mapping[str, LossRule], failure: Failure) -> str | None:
    """Return the part whose loss explains the other losses: the controller, else the trainer, else an engine; None if a part that restarts
    only when lost gave a reason for its end."""
    if any(how == "said" and name in rules and rules[name].only_lost for name, how in failure.ended.items()):
        return None
    ranks = {CONTROLLER: 0, TRAINER: 1}
    return min((name for name in failure.ended if name in rules), key=lambda name: ranks.get(name, 2), default=None)


def in_a_row(failures: Sequence[Failure]) -> int:
    """Return how many starts have failed since one last reached a new highest step; 0 without a failure."""
    row, best = 0, 0
    for failure in failures:
        row = 1 if failure.step > best else row + 1
        best = max(best, failure.step)
    return row
