"""The examples of docs/guides/task.md work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from asyncmoe.config import Config
from asyncmoe.rollout import tasks
from asyncmoe.rollout.tasks.order import EVALUATION
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.configs import minimal
from tests.unit import doc_pages
from tests.unit.test_docs_guides import here  # noqa: F401

pytestmark = pytest.mark.usefixtures("data")
PAGE = doc_pages.read("guides/task.md")


@pytest.fixture
def data(here: Path) -> None:  # noqa: F811
    """Beside the page's file, rows of which the page's is the first."""
    (row,) = [line for line in PAGE.split("\n") if line.startswith('{"question"')]
    levels = ("easy", "medium", "hard")
    for name in ("train", "more", "hard"):
        others = [json.dumps({"question": f"{name} {n}?", "answer": n, "level": levels[n % 3]}) for n in range(9)]
        (here / f"{name}.jsonl").write_text("\n".join([row] * (name == "train") + others))


def config(index: int, **more: object) -> Config:
    block = yaml.safe_load(doc_pages.blocks(PAGE, "yaml")[index].text)
    return minimal(**{"scoring": {"scorer": "exact"}, "task": {"kind": "jsonl", "path": "train.jsonl"}, **block, **more})


def test_a_row_becomes_a_conversation_with_its_columns(known: Tokenizer) -> None:
    task = tasks.load(config(0), known).training
    (prompt,) = [one for one in map(task.prompt, range(10)) if "pen" in one.text]
    assert known.decode(prompt.tokens).startswith("system\nAnswer with one number.\nuser\nA pen costs 3")
    assert (prompt.answer, prompt.columns) == ("15", {"level": "easy"})


def test_rows_are_filtered_and_mixed(known: Tokenizer) -> None:
    task = tasks.load(config(1), known).training
    assert {task.prompt(n).columns["level"] for n in range(14)} == {"easy", "medium"}
    mixed = tasks.load(config(2), known).training
    texts = {mixed.prompt(n).text for n in range(100)}
    assert {text for text in texts if text.startswith("more")} == {"more 2?", "more 5?", "more 8?"}
    assert len(texts) == 13


def test_evaluation_sets(known: Tokenizer) -> None:
    loaded = tasks.load(config(3), known)
    assert {one.name: (one.count, one.section.samples) for one in loaded.sets} == {
        "held_out": (2, 1),
        "hard": (9, 8),
        "capitals": (4, 2),
    }
    held = {loaded.sets[0].task.prompt(n, EVALUATION).text for n in range(2)}
    assert not held & {loaded.training.prompt(n).text for n in range(40)}


def test_the_classes(known: Tokenizer) -> None:
    capitals = tasks.load(config(0, task={"kind": "my_tasks:Capitals"}), known).training
    assert {capitals.prompt(n).columns["country"] for n in range(4)} == {"France", "Japan", "Peru", "Chad"}
    powers = tasks.load(config(0, task={"kind": "my_tasks:Powers", "options": {"most": 5}}), known).training
    for n in range(20):
        prompt = powers.prompt(n)
        base, exponent = (int(word.rstrip("?")) for word in prompt.text.split() if word.rstrip("?").isdigit())
        assert (prompt.answer, prompt.columns) == (str(base**exponent), {"base": base})
        assert base <= 5
    shown = powers.demonstration(0)
    assert " = " in known.decode(shown.given + shown.said)
