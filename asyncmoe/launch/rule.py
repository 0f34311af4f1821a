"""The restart rule: what follows the loss of a part of a run, on one machine, on SLURM and on Ray. Decisions only.

The trainer is started again alone; a controller that a signal ended, or that hangs, together with the trainer, while engines wait for it;
an engine alone. A controller or an engine that says why it ends ends the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from asyncmoe.config import Config
from asyncmoe.errors import RECURRING

CONTROLLER, TRAINER = "controller", "trainer"
How = Literal["lost", "used up", "said"]
"""How a part ended: by a signal, or it hangs; an engine whose server was lost too often; or otherwise, and it said why."""
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 60.0
"""Seconds before the second start after failures in a row, and at most; the first is at once, and each further wait doubles."""


@dataclass(frozen=True)
class LossRule:
    """What the loss of a part means.

    Attributes:
        most: failures in a row after which the part starts again; 0: its loss ends the run.
        key: that sets `most`.
        bar: why the part cannot start again, whatever `most` is; empty: it can.
        brings: another part, which starts again with it.
        only_lost: if it said why it ended, it does not start again.
        spare: the run goes on without it while there is another such part.
    """

    most: int
    key: str
    bar: str = ""
    brings: tuple[str, ...] = ()
    only_lost: bool = False
    spare: bool = False


@dataclass(frozen=True)
class Failure:
    """What has ended at one time.

    Attributes:
        ended: how the parts ended that failed or hang.
        why: the root cause, in words.
        exit_code: of the root cause's error.
        step: highest step that was ever trained.
    """

    ended: Mapping[str, How]
    why: str
    exit_code: int = 1
    step: int = 0


@dataclass(frozen=True)
class StartAgain:
    """Start `parts` again, of which the first was lost, after `after_s` seconds. `row`: its failures in a row so far, of at most `most`."""

    parts: tuple[str, ...]
    after_s: float
    row: int
    most: int


@dataclass(frozen=True)
class LetGo:
    """Go on without a part."""

    part: str


@dataclass(frozen=True)
class EndRun:
    """End the run. `why`: what the root cause does not say; empty: nothing."""

    why: str = ""


def table(config: Config, engines: Sequence[str], *, spare: bool = False) -> dict[str, LossRule]:
    """Return what the loss of each part of a run means, in the order in which the parts are started.

    Args:
        engines: names of the engine processes that the launcher starts.
        spare: whether a run goes on without an engine that is used up; False: its launcher starts all of the run elsewhere.
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

    A start that trains no step beyond those of all earlier starts is a failure in a row: it may have trained again what they had.

    Args:
        rules: of the parts that there still are.
        history: earlier failures since the run was started, oldest first, after which a part was started again.
        stopping: whether the user has asked the run to stop.
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
    """Return the part whose loss explains the others': the controller, else the trainer, else an engine; None if a part that is started
    again only when it is lost said why it ended."""
    if any(how == "said" and name in rules and rules[name].only_lost for name, how in failure.ended.items()):
        return None
    ranks = {CONTROLLER: 0, TRAINER: 1}
    return min((name for name in failure.ended if name in rules), key=lambda name: ranks.get(name, 2), default=None)


def in_a_row(failures: Sequence[Failure]) -> int:
    """Return how many starts, up to the last, have failed since a step was trained that none had trained before; 0 without a failure."""
    row, best = 0, 0
    for failure in failures:
        row = 1 if failure.step > best else row + 1
        best = max(best, failure.step)
    return row
