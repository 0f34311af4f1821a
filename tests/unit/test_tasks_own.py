"""A user's own tasks: what they may provide, where it is used, and the error for each mistake before anything starts."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config import Config
from asyncmoe.config.scoring import ScoringSection
from asyncmoe.config.task import TaskSection
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.rollout import tasks
from asyncmoe.rollout.scoring import Sample, loading
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.configs import minimal

HERE = "tests.unit.task_sources"


def config(kind: str, scorer: str = "exact", seed: int = 0, evaluation: dict[str, object] | None = None, **task: object) -> Config:
    run = {"dir": "run", "steps": 1, "seed": seed}
    return minimal(run=run, task={"kind": kind, **task}, scoring={"scorer": scorer}, evaluation=evaluation or {})


def own(name: str, **values: Any) -> Config:
    return config(f"{HERE}:{name}", **values)


def test_a_finite_task_asks_every_example_in_an_epoch_and_depends_on_the_seed(known: Tokenizer) -> None:
    task = tasks.load(own("Capitals"), known).training
    prompts = [task.prompt(n) for n in range(12)]
    assert sorted(prompt.columns["index"] for prompt in prompts[:6]) == list(range(6))
    assert sorted(prompt.columns["index"] for prompt in prompts[6:]) == list(range(6))
    again = tasks.load(own("Capitals"), known).training
    assert again.prompt(7) == prompts[7], "a resumed run begins anywhere"
    other = tasks.load(own("Capitals", seed=1), known).training
    assert [other.prompt(n) for n in range(12)] != prompts


def test_a_prompt_is_text_or_messages_or_tokens(known: Tokenizer) -> None:
    text = tasks.load(own("Capitals", system_prompt="Be brief."), known).training.prompt(0)
    assert known.decode(text.tokens) == f"system\nBe brief.\nuser\n{text.text}\nassistant\n"
    assert text.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": text.text})
    bare = tasks.load(own("Capitals", chat_template=False), known).training.prompt(0)
    assert known.decode(bare.tokens) == bare.text == text.text
    said = tasks.load(own("Capitals", options={"form": "messages"}), known).training.prompt(0)
    assert known.decode(said.tokens) == f"user\nHi\nassistant\nYes?\nuser\n{text.text}\nassistant\n"
    assert (said.text, said.columns) == (text.text, text.columns)
    tokens = tasks.load(own("Doubles"), known).training.prompt(3)
    assert tokens.tokens == (10 + tokens.columns["number"] % 7, 11, 12)
    assert tokens.text == known.decode(tokens.tokens)
    assert tokens.answer == str(2 * tokens.columns["number"])


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Missing", {}, r"task\.kind: got .*Missing: AttributeError"),
        ("Capitals", {"size": 3}, r"task\.kind: got .*TypeError: .*'size'.*expected a class that can be made with task\.options"),
        ("Neither", {}, r"task\.kind: got .*Neither, which has neither draw nor .*, expected a class with `draw"),
        ("Wrong", {"form": "nan"}, r"Wrong, example 5, column level: got Out of range float .*expected JSON in UTF-8; leave it out of"),
        ("Wrong", {"form": "half"}, r"Wrong, example 5, prompt: got .*surrogates not allowed"),
        ("Empty", {}, r"Empty: got no examples, expected at least one"),
        ("Lottery", {}, r"Lottery, draw: got another example when asked again, .* the same example, .*from the argument `random` only"),
        ("Wrong", {"form": "blank"}, r"Wrong, example 5, prompt: got ' '"),
        ("Wrong", {"form": "number"}, r"Wrong, example 5, answer: got 3, expected text"),
        ("Wrong", {"form": "column"}, r"Wrong, example 5, column when: got .*type set .*expected JSON"),
        ("Wrong", {"form": "assistant"}, r"Wrong, example 5, prompt: got a last message of the assistant"),
        ("Wrong", {"form": "role"}, r"Wrong, example 5, prompt: got \{'content': 'I say'\}, expected text, messages"),
        ("Wrong", {"form": "mixed"}, r"Wrong, example 5, prompt: got 1, expected text, messages"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_in_one_line(known: Tokenizer, name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        tasks.load(own(name, options=options), known)
    assert re.search(said, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "said"), [("raises", r"KeyError: 'missing' at tests/unit/task_sources\.py:\d+"), ("says", "got str 'a text'")]
)
def test_a_task_that_breaks_later_names_its_line(known: Tokenizer, how: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        tasks.load(own("Breaks", options={"how": how}), known)  # the trial is the first two draws, the first prompt the third


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused(tmp_path: Path, known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "positions", 2048)
    path = rows(tmp_path / "d.jsonl", {"question": "1 + " * 3000, "answer": "1"})
    line = r"d\.jsonl line 1, prompt: got \d+ tokens, expected fewer than the 2048 of the model's context"
    with pytest.raises(DataError, match=line):
        tasks.load(config("jsonl", path=str(path)), known)
    few = config("jsonl", path=str(rows(path, {"question": "1 + 1 = ", "answer": "2"})))
    tasks.load(few, known)
    few = few.model_copy(update={"environment": few.environment.model_copy(update={"max_tokens": 4})})
    with pytest.raises(DataError, match=r"expected fewer than the 4 of environment\.max_tokens, with room for a response"):
        tasks.load(few, known)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "arithmetic", "system_prompt": "x"}, r"task\.system_prompt: got x, expected none because task\.kind is arithmetic"),
        ({"kind": "jsonl", "path": "x", "options": {"a": 1}}, r"task\.options: got \{'a': 1\}, expected none because task\.kind is jsonl"),
        ({"kind": f"{HERE}:Capitals", "scorer": "auto"}, r"scoring\.scorer: got auto, expected a scorer by name"),
        ({"kind": f"{HERE}:Capitals", "where": {"a": 1}}, r"task\.where: got .* expected none because task\.kind is tests"),
        ({"kind": "jsonl", "path": "x", "split": "test"}, r"task\.kind: got jsonl, expected dataset because a subset or a split"),
        ({"kind": "jsonl", "path": "x", "chat_template": False, "system_prompt": "x"}, r"task\.system_prompt: got 'x', expected null"),
        ({"kind": "jsonl", "sources": [{"weight": 1}]}, r"task\.sources: got nothing, expected the path of a JSONL file"),
        ({"kind": "jsonl", "sources": [{"path": "x", "weight": 0}]}, r"task\.sources\.0\.weight: got 0, expected greater than 0"),
        ({"kind": "jsonl", "path": "x", "where": {"a": {"b": 1}}}, r"task\.where: got .*expected a text, a number or a list .* for a"),
        ({"kind": "jsonl", "path": "x", "filter": "easy"}, r"task\.filter: got 'easy', expected package\.module:name"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        config(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("scorer", "reward"), [("scored", 5.0), ("awaited", 5.0), ("Scores", 4.0)])
def test_columns_reach_a_scorer(scorer: str, reward: float) -> None:
    async def run() -> float:
        made = loading.load(
            ScoringSection(scorer=f"{HERE}:{scorer}", concurrency=1, timeout_s=30), TaskSection(kind="arithmetic"), lambda tokens: ""
        )
        try:
            return (await made.score(Sample("q", "Suva", "Suva", columns={"index": 4}))).reward
        finally:
            await made.close()

    assert asyncio.run(run()) == reward


def rows(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


LEVELS = [{"question": f"q{n}", "answer": n, "level": ("easy", "hard")[n % 2], "n": n} for n in range(10)]


def test_columns_of_a_file_are_carried_and_renamed(tmp_path: Path, known: Tokenizer) -> None:
    path = rows(tmp_path / "d.jsonl", {"problem": [{"role": "user", "content": "q"}], "tests": ["a()", {"b": None}], "id": 7})
    made = config("jsonl", path=str(path), columns={"question": "problem", "answer": None})
    assert tasks.load(made, known).training.prompt(0).columns == {"tests": ["a()", {"b": None}], "id": 7}
    made = config("jsonl", path=str(path), columns={"question": "problem", "answer": "id", "keep": ["tests"]})
    prompt = tasks.load(made, known).training.prompt(0)
    assert (prompt.text, prompt.answer, prompt.columns) == ("q", "7", {"tests": ["a()", {"b": None}]})


def test_rows_are_kept_by_value_and_by_function(tmp_path: Path, known: Tokenizer) -> None:
    path = str(rows(tmp_path / "d.jsonl", *LEVELS))

    def left(**keys: object) -> list[str]:
        task = tasks.load(config("jsonl", path=path, **keys), known).training
        answers = [task.prompt(n).answer for n in range(20)]
        return sorted(set(answers), key=int)

    assert left(where={"level": "easy"}) == ["0", "2", "4", "6", "8"]
    assert left(where={"n": [1, 2, 3], "level": "hard"}) == ["1", "3"]
    assert left(filter=f"{HERE}:compared") == ["0", "2", "4", "6", "8"], "numpy's booleans are booleans"
    assert left(filter=f"{HERE}:easy", where={"n": [0, 1, 2]}) == ["0", "2"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"where": {"level": "grim"}}, r"task\.path .*d\.jsonl: got no row left of 10, expected at least one"),
        ({"where": {"n": True}}, "got no row left of 10"),
        ({"where": {"lvl": "easy"}}, r"d\.jsonl line 1, lvl: got nothing, expected the column that task\.where names; columns: question"),
        ({"filter": f"{HERE}:maybe"}, r"task\.filter, .*d\.jsonl line 1: got .*maybe: 'easy', expected true or false"),
        ({"filter": f"{HERE}:fails"}, r"filter .*:fails, .* line 1: got KeyError: 'difficulty' at tests/unit/task_sources\.py:\d+"),
        ({"columns": {"question": "problem"}}, r"line 1, problem: got nothing, .*its columns are question, answer, level, n;"),
    ],
)
def test_rows_that_cannot_be_used_name_file_line_and_column(tmp_path: Path, known: Tokenizer, keys: dict[str, Any], said: str) -> None:
    path = rows(tmp_path / "d.jsonl", *LEVELS)
    with pytest.raises((ConfigError, DataError)) as caught:
        tasks.load(config("jsonl", path=str(path), **keys), known)
    assert re.search(said, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_mixture_keeps_its_weights_and_every_source_its_epochs(tmp_path: Path, known: Tokenizer) -> None:
    first = rows(tmp_path / "a.jsonl", *({"question": f"a{n}", "answer": "1"} for n in range(10)))
    second = rows(tmp_path / "b.jsonl", *({"question": f"b{n}", "answer": "1"} for n in range(7)))
    sources = [{"path": str(first), "weight": 3}, {"path": str(second)}]
    task = tasks.load(config("jsonl", sources=sources, chat_template=False), known).training
    asked = [task.prompt(n).text for n in range(3000)]
    share = sum(text[0] == "a" for text in asked) / 3000
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / 3000) ** 0.5
    of_a, of_b = ([text for text in asked if text[0] == which] for which in "ab")
    assert all(len(set(of_a[i : i + 10])) == 10 for i in range(0, len(of_a) - 9, 10))
    assert all(len(set(of_b[i : i + 7])) == 7 for i in range(0, len(of_b) - 6, 7))
    resumed = tasks.load(config("jsonl", sources=sources, chat_template=False), known).training
    assert [resumed.prompt(n).text for n in (2999, 1500, 0)] == [asked[n] for n in (2999, 1500, 0)]


def test_without_its_package_only_a_data_set_is_refused(tmp_path: Path, known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "d.parquet").write_text("")
    with pytest.raises(DataError, match=r"task\.path .*none\.jsonl: got no such file or directory, expected a .jsonl file in UTF-8$"):
        tasks.load(config("jsonl", path=str(tmp_path / "none.jsonl")), known)
    with pytest.raises(ConfigError, match=r"task\.kind: got dataset without its package .*run: \S+ -m pip install \"datasets>="):
        tasks.load(config("dataset", path=str(tmp_path / "d.parquet")), known)
    path = rows(tmp_path / "d.jsonl", *LEVELS)
    assert tasks.load(config("dataset", path=str(path), where={"level": "hard"}), known).training.prompt(0).columns["level"] == "hard"
