"""Answers in mathematics: references of every form, 400 judged pairs, answers that do not end, and mutations of all of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncmoe.rollout.scoring import Sample, loading
from asyncmoe.rollout.scoring.mathematics import reference, score
from asyncmoe.rollout.scoring.types import MARK
from asyncmoe.rollout.scoring.workers import InWorkers
from asyncmoe.rollout.tasks.jsonl import read

DATA = Path(__file__).parent / "data"
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@dataclass(frozen=True)
class Case:
    """A line of the data file."""

    kind: str
    gold: str
    right: str
    wrong: str


def _cases() -> Iterator[Case]:
    kind = ""
    for line in (DATA / "math_golds.tsv").read_text().splitlines():
        if line.startswith("#"):
            kind = line[2:]
        else:
            yield Case(kind, *line.split("\t")[:3])


def rows(name: str) -> list[dict[str, Any]]:
    """Lines of a file of judged answers, with repeated texts written out."""
    found = [json.loads(line) for line in (DATA / "answers" / f"{name}.jsonl").read_text().splitlines()]
    for row in found:
        for part in ("repeat", "again"):
            if part in row:
                row["answer"] = row["answer"].replace(f"{{{part}}}", row[part]["text"] * row[part]["times"])
    return found


CASES = list(_cases())


@pytest.mark.parametrize("kind", dict.fromkeys(case.kind for case in CASES))
def test_another_notation_is_right_and_another_answer_wrong(kind: str) -> None:
    for case in [case for case in CASES if case.kind == kind]:
        assert (score("", case.right, case.gold), score("", case.wrong, case.gold)) == (1.0, 0.0), case
        assert score("", case.gold, case.gold) == 1.0, case


def test_judged_pairs_are_scored_as_judged() -> None:
    wrong = [row for row in rows("pairs") if score("", row["answer"], row["gold"]) != float(row["equal"])]
    print(*(f"{row['stratum']}: {row['gold']!r} and {row['answer']!r} equal={row['equal']}" for row in wrong), sep="\n")
    assert len(wrong) <= 8
    assert [row for row in wrong if not row["equal"]] == []


@pytest.mark.parametrize("row", rows("explained"), ids=lambda row: f"{row['answer']!a:.60} {row['gold']!a}")
def test_an_answer_stands_whatever_is_said_beside_it(row: dict[str, Any]) -> None:
    assert score("", row["answer"], row["gold"]) == float(row["equal"])


def test_answers_that_do_not_end_are_wrong_within_bounds() -> None:
    """The real process, whose limit is the configured time-out: it takes 2 s for none of them, on a busy machine less than 20."""
    judge = InWorkers(loading.MATH_VERIFY, {}, False, 20.0, 1)

    async def run() -> list[tuple[float, object]]:
        await judge.call(Sample("", "1", "1"))
        took = []
        for row in rows("endless"):
            begin = time.perf_counter()
            took.append((await judge.call(Sample("", row["answer"], row["gold"])), time.perf_counter() - begin, row["why"]))
        (process,) = judge._processes._idle
        assert int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0]) < 500 * 1024
        await judge.close()
        return took

    scored = asyncio.run(run())
    print(*sorted((f"{seconds:.2f} s  {why}" for _, seconds, why in scored), reverse=True), sep="\n")
    assert {reward["reward"] for reward, _, _ in scored} == {0.0}


@pytest.mark.parametrize(
    "gold", ["7^7^7^7", "(10!)!", r"10^{-10^{10}}", "(" * 50 + "1" + ")" * 50, "9" * 900, r"\binom{10^9}{10^8}", "1+" * 3000]
)
def test_a_reference_beyond_the_bounds_is_refused(gold: str) -> None:
    with pytest.raises(ValueError, match="too long, too nested or too large"):
        reference(gold)


OPERATIONS = ["{}^{{{}}}", r"\frac{{{}}}{{{}}}", "({})!+{}", r"\binom{{{}}}{{{}}}", r"\sqrt[{}]{{{}}}"]
OPERATIONS += [
    r"\sin({})^{}",
    r"\log_{{{}}} {}",
    "{}<{}",
    r"{} \text{{ or }} {}",
    "({}-{})",
    r"{}\cdot {}",
    r"\{{{},{}\}}",
    "[{},{})",
    r"{}\pm {}",
    r"{}\cup {}",
    "{}={}",
    "{}, {}",
    r"\{{x : {} < {}\}}",
]
ATOMS = ["9", "10", "x", "n", r"\pi", "2.5", "e", "i", "10^{10}", r"\infty", "0", "-1", "1e9", "100!", r"0.\overline{3}", "7 cm"]


def test_any_text_is_scored_without_an_exception_or_much_work() -> None:
    """Seeded: nested operations, and judged answers with parts repeated, dropped and exchanged."""
    random, known = Random(7), [text[:3000] for name in ("pairs", "endless") for row in rows(name) for text in (row["gold"], row["answer"])]

    def nested(depth: int) -> str:
        return random.choice(ATOMS) if depth == 0 else random.choice(OPERATIONS).format(nested(depth - 1), nested(random.randrange(depth)))

    for _ in range(150):
        text, other = random.choice(known), random.choice(known)
        at, width, place = random.randrange(len(text) + 1), random.randrange(20), random.randrange(len(other))
        mutated = text[:at] + other[place : place + width] + text[at : at + width] * random.randrange(80) + text[at + width :]
        for response in (mutated, rf"\boxed{{{nested(random.randrange(1, 5))}}}"):
            begin = time.process_time()
            assert score("", response, random.choice(CASES).gold) in (0.0, 1.0)
            assert time.process_time() - begin < 10, response


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K's files are not beside this checkout")
def test_every_answer_of_gsm8k_is_right_in_any_notation_and_another_is_wrong() -> None:
    golds = sorted({row.answer for name in ("train", "test") for row in read(GSM8K / f"{name}.jsonl")})
    assert len(golds) > 900
    for gold in golds:
        number = int(gold.replace(",", ""))
        assert score("", rf"So it is \boxed{{{number}}}.", gold) == 1.0
        assert score("", f"5 + 5 = 10\n{MARK} {number:,}", gold) == 1.0
        assert score("", rf"\boxed{{{number + 1}}}", gold) == 0.0


UNEQUAL = r"""HTH|HHT cat|act IV|VI H2O|HO2 i|I \omega|\Omega no|on 2020-05-06|2009 12-25|-13 3-5|4-6 555-1234|-679 1/2/2024|1/4048
-2|3-5~days 1,5|1.5 1;5|1.5 3,~14|3.14 0,1|\frac{1}{10} \{1,2\}|\{\{1,2\}\} 10~mW|10~MW 5~mg|5~Mg 5~ms|5~Ms 5~mV|5~MV 5~m|5~M 5~Kb|5~KB
5~MHz|5~mHz 2~dozen|2 \$2~million|2 2~hundreds|2 5|5~squared 5|5~cubed 5|5~factorial 5|half~of~5 5|twice~5 5|the~square~root~of~5
5|at~least~5 5|less~than~5 5|negative~5 5|minus~5 5|大于5 5|5~and~a~half 5|5~is~incorrect 5|5的一半 5|5的平方 5|5~\text{~squared}
BAD|DAB FACE|CAFE DAD|ADD DAD|AD AA|A ABC|ABD AB|ABC AE|A,C"""
EQUAL = r"""-5|minus~5 -5|negative~5 -5|负5 25|5~squared 120|5~factorial 24|2~dozen 5.5|5~and~a~half xy|yx \{1,1,2\}|\{1,2\} half|1/2
2~kg|2~KG 2~hours|2~Hours 3-5|3-5 Cat|cat ABC|ACB ACB|ABC BAC|C,A~and~B A,~C|CA FACE|FACE B,A|(A),(B)"""


@pytest.mark.parametrize(("pair", "worth"), [(pair, worth) for pairs, worth in ((UNEQUAL, 0.0), (EQUAL, 1.0)) for pair in pairs.split()])
def test_what_only_looks_alike_is_unequal_and_other_words_are_equal(pair: str, worth: float) -> None:
    gold, given = pair.replace("~", " ").split("|")
    assert [score("", text, gold) for text in (rf"\boxed{{{given}}}", f"The answer is {given}.")] == [worth, worth]
    assert score("", "答案不是5", "5") == 0.0


@pytest.mark.parametrize("gold", [r"\text{}", "$$", r"\boxed{}", "$ $", ".", "\\,"])
def test_a_reference_without_content_is_refused(gold: str) -> None:
    with pytest.raises(ValueError, match="no content"):
        score("", gold, gold)
