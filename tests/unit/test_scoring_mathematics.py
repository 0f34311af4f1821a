"""Answers in mathematics: every form of reference against another notation, a wrong answer, and math-verify called as its README says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from math_verify import parse, verify

from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.queue.bounded import BoundedQueue
from asyncmoe.rollout.answer_mark import MARK
from asyncmoe.rollout.engines.types import Generation, VersionSpan
from asyncmoe.rollout.episodes.trajectory_builder import EpisodeId, Turn, assemble
from asyncmoe.rollout.producer import Producer
from asyncmoe.rollout.scoring import Sample, loading, notation
from asyncmoe.rollout.scoring.mathematics import score, self_score
from asyncmoe.rollout.tasks import Prompt
from asyncmoe.rollout.tasks.jsonl import read
from asyncmoe.trajectory import Recording, Trajectory

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
REVIEW = [r"\sqrt{2}", "x^2+1", "B", r"\text{even}", r"\{1,2,3\}", "[0,1)", "(3, 4)"]


@dataclass(frozen=True)
class Case:
    """A line of the data file. `misread`: what math-verify alone gets wrong."""

    kind: str
    gold: str
    right: str
    wrong: str
    misread: str


def _cases() -> Iterator[Case]:
    kind = ""
    for line in (Path(__file__).parent / "data" / "math_golds.tsv").read_text().splitlines():
        if line.startswith("#"):
            kind = line[2:]
        else:
            gold, right, wrong, *misread = line.split("\t")
            yield Case(kind, gold, right, wrong, *(misread or [""]))


CASES = list(_cases())
KINDS = list(dict.fromkeys(case.kind for case in CASES))


def tried(cases: Sequence[Case], most: int, thorough: bool) -> Sequence[Case]:
    """All cases, or without --thorough those of the review and of each kind, and a seeded sample of the others."""
    kept = [case for case in cases if case.gold in REVIEW] + list({case.kind: case for case in cases}.values())
    others = [case for case in cases if case not in kept]
    return cases if thorough else list(dict.fromkeys(kept)) + Random(23).sample(others, min(most, len(others)))


def documented(gold: str, response: str) -> bool:
    """The README's example of use: both parsed, the reference in a LaTeX environment."""
    return bool(verify(parse(gold if notation.in_latex(gold) else f"${gold}$"), parse(response)))


@pytest.mark.parametrize("kind", KINDS)
def test_another_notation_is_right_and_another_answer_wrong(kind: str, thorough: bool) -> None:
    for case in tried([case for case in CASES if case.kind == kind], 2, thorough):
        assert (score("", case.right, case.gold), score("", case.wrong, case.gold)) == (1.0, 0.0), case
        assert score("", case.gold, case.gold) == 1.0, case
        assert self_score("", case.gold, case.gold) == (0.5 if case.gold == "2:45 p.m." else 1.0), case
        agrees = (documented(case.gold, case.right), documented(case.gold, case.wrong)) == (True, False)
        assert agrees == (not case.misread), case


def test_there_are_enough_and_those_of_the_review_are_among_them() -> None:
    golds = {case.gold for case in CASES}
    assert len(golds) >= 210
    assert golds >= set(REVIEW)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K's files are not beside this checkout")
def test_every_answer_of_gsm8k_is_right_in_any_notation_and_another_is_wrong(thorough: bool) -> None:
    """Without --thorough one answer of each form (signs, digits, commas), and some more."""
    golds = sorted({row.reference for name in ("train", "test") for row in read(GSM8K / f"{name}.jsonl")})
    assert len(golds) > 900
    forms = {re.sub(r"\d", "9", gold): gold for gold in golds}
    for gold in golds if thorough else {*forms.values(), *Random(23).sample(golds, 60)}:
        number = int(gold.replace(",", ""))
        assert score("", rf"So it is \boxed{{{number}}}.", gold) == 1.0
        assert score("", f"5 + 5 = 10\n{MARK} {number:,}", gold) == 1.0
        assert score("", rf"\boxed{{{number + 1}}}", gold) == 0.0
        assert documented(gold, rf"\boxed{{{number}}}")


@pytest.mark.parametrize(
    ("response", "gold", "worth"),
    [
        ("#### Conclusion\nThus $\\boxed{18}$", "18", 1.0),
        ("#### Conclusion\nThe answer is 18.", "18", 1.0),
        ("#### 18\n\n9 and 9 are 18, not 19", "18", 1.0),
        ("#### The answer is 18", "18", 1.0),
        ("\\boxed{18}\n#### 17", "18", 0.0),
        ("#### 18\n19", "19", 0.0),
        ("#### (3, 4)", "4", 0.0),
        ("(3, 4)", "4", 0.0),
        ("It costs $5 each, so 3 cost $15.", "15", 1.0),
        ("x = 5 or x = 6", "5", 0.0),
        ("\\boxed{5} or \\boxed{6}", "5", 0.0),
        ("1.5", "15", 0.0),
        ("1 2", "12", 0.0),
        ("3xy", "3", 0.0),
        ("3 alpha", "3", 0.0),
        ("A dog has four legs.", "A", 0.0),
        ("I choose B, not C.", "C", 0.0),
        ("I think 5", "5", 1.0),
        ("It is 5.", "5", 1.0),
        ("ln 2", "2", 0.0),
        ("**5**", "5", 1.0),
        ("**B**", "B", 1.0),
        ("The answer is **5**.", "5", 1.0),
        ("\\boxed{\\frac12}", "½", 1.0),
        ("\\boxed{4}", "2²", 1.0),
        ("\\boxed{22}", "2²", 0.0),
        ("\\boxed{\\sqrt{2}}", "√2", 1.0),
        ("\\boxed{\\infty}", "∞", 1.0),
        ("３", "3", 1.0),
        ("\\boxed{", "18", 0.0),
        ("\\boxed{}", "18", 0.0),
        ("\\frac{", "18", 0.0),
        ("$$", "18", 0.0),
        ("\x00\ud83d ☃ \u202e", "18", 0.0),
        ("{" * 5000, "18", 0.0),
        ("\\text{" * 500, "18", 0.0),
        ("9" * 3000, "18", 0.0),
    ],
)
def test_where_the_final_answer_of_a_response_is(response: str, gold: str, worth: float) -> None:
    assert score("", response, gold) == worth


@pytest.mark.parametrize("gold", [r"\text{}", "$$", r"\boxed{}", "$ $", ".", "\\,"])
def test_a_reference_without_content_is_refused(gold: str) -> None:
    with pytest.raises(ValueError, match="no content"):
        score("", gold, gold)


class Golds:
    """A task with a question for each case, whose policy answers right in the even members of a group and wrong in the odd ones."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases

    def prompt(self, group: int, stream: str = "prompt") -> Prompt:
        return Prompt(json.dumps(group), (1, 2), self._cases[group % len(self._cases)].gold)


def test_a_run_on_all_of_them_rejects_none(monkeypatch: pytest.MonkeyPatch, thorough: bool) -> None:
    """The producer, the queue and the scorer's real processes; only the responses are given. Without --thorough on a part of them."""
    cases = CASES if thorough else [case for case in CASES if case.gold in REVIEW]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    size, rewards = 2, dict[tuple[int, int], float]()

    async def run() -> None:
        section = ScoringSection(scorer="math_verify", retries=0, concurrency=2 if thorough else 1)
        made = loading.load(section, TaskSection(kind="arithmetic"), lambda tokens: "")
        held = BoundedQueue(capacity=len(cases) * size, batch=len(cases) * size, group_size=size, max_staleness=0)

        async def episode(prompt: Prompt, place: EpisodeId) -> tuple[Trajectory, ...]:
            case = cases[place.group % len(cases)]
            reward = (await made.score(Sample(prompt.text, (case.right, case.wrong)[place.episode], prompt.answer))).reward
            rewards[place.group, place.episode] = reward
            turn = Turn(prompt.tokens, Generation.of((7, 2), (-0.5, -0.25), (VersionSpan("0", 0, 2),), "stop", 0), 0)
            return (assemble([turn], place, Recording(), reward, {}),)

        producing = asyncio.create_task(Producer(held, Golds(cases), episode, size).run())  # type: ignore[arg-type]
        async with asyncio.timeout(120):
            while held.stats().depth < len(cases) * size and not producing.done():
                await asyncio.sleep(0.05)
        producing.cancel()
        await asyncio.wait({producing})
        await made.close()
        assert held.stats().rejected == {}
        assert held.stats().depth == len(cases) * size

    asyncio.run(run())
    assert {place: reward for place, reward in rewards.items() if reward != float(place[1] == 0)} == {}
