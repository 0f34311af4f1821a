"""Evaluation sets: their questions, which training never uses, and pass@k."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.launch import evaluate
from asyncmoe.rollout import tasks
from asyncmoe.rollout.evaluation import pass_chances
from asyncmoe.rollout.tasks.encode import identity
from asyncmoe.rollout.tasks.order import EVALUATION
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.configs import minimal
from tests.unit.asynchronous import asynchronous
from tests.unit.test_evaluation import Setup


def rows(path: Path, *questions: object) -> str:
    path.write_text("".join(json.dumps({"question": question, "answer": "1"}) + "\n" for question in questions))
    return str(path)


def config(task: dict[str, object], seed: int = 0, **evaluation: object) -> Config:
    sections = {"task": {"kind": "jsonl", "chat_template": False, **task}, "evaluation": {"every": 1, **evaluation}}
    return minimal(run={"dir": "run", "steps": 1, "seed": seed}, scoring={"scorer": "exact"}, **sections)


def asked(loaded: tasks.Tasks) -> tuple[set[str], list[list[str]]]:
    """Texts of training over many epochs, the warm-up's included, and of each set."""
    training = {loaded.training.prompt(n).text for n in range(400)}
    return training, [[one.task.prompt(n, EVALUATION).text for n in range(one.count)] for one in loaded.sets]


def test_training_never_asks_a_held_out_question(tmp_path: Path, known: Tokenizer) -> None:
    # Every question is twice in the file, once with other white space and once as a message.
    twice = [q for n in range(40) for q in (f"q {n}?", f" q  {n}?\n" if n % 2 else [{"role": "user", "content": f"q {n}?"}])]
    task = {"path": rows(tmp_path / "d.jsonl", *twice), "chat_template": True}
    loaded = tasks.load(config(task, prompts=10), known)
    training, (held,) = asked(loaded)
    assert len(held) == 10
    plain = {identity(text) for text in held}
    assert not plain & {identity(text) for text in training}
    assert {identity(f"q {n}?") for n in range(40)} == plain | {identity(text) for text in training}
    shown = "".join(known.decode(loaded.training.demonstration(n).given) for n in range(200))
    assert not any(f"q {n}?" in " ".join(shown.split()) for n in range(40) if identity(f"q {n}?") in plain)
    again = asked(tasks.load(config(task, prompts=10), known))
    assert again[1] == [held], "the same questions after a resume"
    assert asked(tasks.load(config(task, seed=1, prompts=10), known))[1] != [held]


def test_a_mixture_holds_out_by_its_weights(tmp_path: Path, known: Tokenizer) -> None:
    first, second = (rows(tmp_path / f"{name}.jsonl", "common", *(f"{name}{n}" for n in range(99))) for name in "ab")
    sources = [{"path": first, "weight": 3}, {"path": second}]
    training, (held,) = asked(tasks.load(config({"sources": sources}, prompts=40), known))
    assert len(set(held)) == 40
    assert not set(held) & training
    assert 20 <= sum(text[0] == "a" for text in held) <= 38


def test_sets_of_their_own_and_held_out_ones(tmp_path: Path, known: Tokenizer) -> None:
    train = rows(tmp_path / "train.jsonl", *(f"q{n}" for n in range(20)))
    few, hard = rows(tmp_path / "few.jsonl", "x1", "x2", "x3"), rows(tmp_path / "hard.jsonl", *(f"y{n}" for n in range(100)))
    sets = {
        "few": {"path": few, "samples": 4},
        "hard": {"path": hard, "prompts": 7, "temperature": 0},
        "held": {},
        "sums": {"kind": "arithmetic", "prompts": 3},
        "own": {"kind": "tests.unit.task_sources:Capitals", "prompts": 3},
    }
    loaded = tasks.load(config({"path": train}, prompts=5, sets=sets), known)
    training, texts = asked(loaded)
    assert {one.name: (one.count, one.section.samples) for one in loaded.sets} == {
        **{"few": (3, 4), "hard": (7, 1), "held": (5, 1)},
        **{"sums": (3, 1), "own": (3, 1)},
    }
    assert sorted(texts[0]) == ["x1", "x2", "x3"]
    assert len(set(texts[1])) == 7
    assert not set(texts[2]) & training
    assert len(set(texts[2]) | training) == 20
    assert all(re.fullmatch(r"\d\+\d=", text) for text in texts[3])
    assert all("capital" in text for text in texts[4])


def test_training_leaves_out_what_a_set_asks(tmp_path: Path, known: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    train = rows(tmp_path / "train.jsonl", *(f"q{n}" for n in range(6)))
    test = rows(tmp_path / "test.jsonl", "q1", " q4", "z")
    training, _ = asked(tasks.load(config({"path": train}, path=test), known))
    assert training == {"q0", "q2", "q3", "q5"}
    assert "train.jsonl: training leaves out 2 questions that the evaluation asks" in caplog.text
    with pytest.raises(DataError, match="got only questions that the evaluation asks"):
        tasks.load(config({"path": train}, path=train), known)
    alone = evaluate.alone(config({"path": train}, path=train), tmp_path, tmp_path)
    assert len(asked(tasks.load(alone, known))[1][0]) == 6, "`asyncmoe eval` trains on none of them"


def test_a_file_too_small_to_hold_out_is_refused(tmp_path: Path, known: Tokenizer) -> None:
    path = rows(tmp_path / "d.jsonl", *(f"q{n}" for n in range(9)))
    with pytest.raises(DataError, match=r"evaluation\.prompts: got 5 held-out questions, expected at most half of the 9 questions of"):
        tasks.load(config({"path": path}, prompts=5), known)
    assert tasks.load(config({"path": path}, prompts=4), known).sets[0].count == 4


SEVERAL = {"kind": "dataset", "sources": [{"path": "x"}, {"path": "y"}]}


@pytest.mark.parametrize(
    ("task", "evaluation", "said"),
    [
        ({}, {"path": "x", "sets": {"a": {}}}, r"evaluation\.path: got x, expected null"),
        ({}, {"sets": {"a b": {}}}, r"evaluation\.sets: got the name 'a b', expected letters"),
        ({}, {"sets": {"a": {"where": {"b": 1}}}}, r"evaluation\.sets\.a\.path: got nothing, expected a path, because"),
        ({}, {"sets": {"a": {"sample": 3}}}, r"evaluation\.sets\.a\.sample: got an unknown key"),
        ({}, {"sets": {"a": {"samples": 0}}}, r"evaluation\.sets\.a\.samples: got 0"),
        ({}, {"sets": {"a": {"kind": "jsonl", "split": "test", "path": "x"}}}, r"evaluation\.sets\.a\.kind: got jsonl, expected dataset"),
        (SEVERAL, {"sets": {"a": {"split": "test"}}}, r"evaluation\.sets\.a\.path: got nothing, expected a path because"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(task: dict[str, Any], evaluation: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(task or {"path": "x"}, **evaluation)


def test_pass_at_k_is_the_share_of_passing_subsets() -> None:
    """The definition of Chen et al. 2021 by enumeration: of all subsets of k episodes, those with one that passes."""
    random = Random(0)
    rewards = [[random.choice([0.0, 0.5, 1.0, 2.0]) for _ in range(n)] for n in (8, 8, 5, 1, 7)]
    found = pass_chances(rewards, 8, 1.0)
    assert list(found) == ["1", "2", "4", "8"]
    for k in (1, 2, 4, 8):
        shares = []
        for of_question in rewards:
            subsets = list(combinations([reward >= 1.0 for reward in of_question], k))
            if subsets:
                shares.append(sum(map(any, subsets)) / len(subsets))
        assert found[str(k)] == pytest.approx(shares)
    assert list(pass_chances([[1.0]] * 2, 6, 1.0)) == ["1"], "a k that no question has episodes for is not estimated"
    assert list(pass_chances([[0.0] * 6], 6, 1.0)) == ["1", "2", "4", "6"]
    assert pass_chances([], 4, 1.0) == {}


@asynchronous
async def test_each_set_has_a_record_with_its_samples(known: Tokenizer) -> None:
    setup = Setup(known, sets={"greedy": {"temperature": 0, "samples": 1}, "many": {"samples": 3, "prompts": 2}})
    await setup.evaluate(10)
    while len(setup.found) < 2:
        await asyncio.sleep(0)
    await setup.stop()
    assert len({request.prompt for request in setup.engines.requests}) == 8, "sets share neither prefix groups nor conversations"
    first, second = setup.found
    assert [(one.name, one.questions, one.episodes, one.samples) for one in (first, second)] == [("greedy", 6, 6, 1), ("many", 2, 6, 3)]
    assert (first.pass_at, second.pass_at) == ({"1": 1.0}, {"1": 1.0, "2": 1.0, "3": 1.0})
