"""Every kind of text file gives the same rows, with texts as they were written; damaged ones are named.

Files of Arrow are in tests/integrations/test_datasets.py, which has `datasets`.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config.task import ColumnsSection
from asyncmoe.errors import DataError
from asyncmoe.rollout import tasks
from asyncmoe.rollout.tasks.jsonl import example_of
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.configs import minimal
from tests.unit.file_rows import CALLS, KEYS, NESTED, TALK, TEXTS, written


def loaded(path: Path, known: Tokenizer, kind: str = "dataset", **keys: Any) -> tasks.Tasks:
    return tasks.load(minimal(task={"kind": kind, "path": str(path), "chat_template": False, **keys}), known)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((f"d{suffix}", "dataset") for suffix in (".jsonl", ".json", ".lines.json", ".csv", ".tsv", ".jsonl.gz", ".csv.gz", ".TSV.gz")),
        ("d.jsonl", "jsonl"),
        ("d.jsonl.gz", "jsonl"),
    ],
)
def test_every_kind_of_text_file_gives_the_same_rows(tmp_path: Path, known: Tokenizer, name: str, kind: str) -> None:
    path = written(tmp_path / name.lower()).rename(tmp_path / name)
    task = loaded(path, known, kind, columns=KEYS).training
    found = {prompt.text: prompt for prompt in map(task.prompt, range(20))}
    assert [found[text].answer for text in TEXTS] == [row["reward_model"]["ground_truth"].strip() for row in NESTED]
    assert [found[text].columns for text in TEXTS] == [{"level": row["level"]} for row in NESTED]
    assert [known.decode(found[text].tokens) for text in TEXTS] == [f"{text}\n" for text in TEXTS]


def test_a_dotted_name_reaches_into_nested_values(tmp_path: Path, known: Tokenizer) -> None:
    found = loaded(written(tmp_path / "d.jsonl"), known, columns=KEYS, where={"reward_model.ground_truth": ["NA", "1e5"]}).training
    assert {found.prompt(n).answer for n in range(4)} == {"NA", "1e5"}
    for name in ("reward_model.truth", "level.of"):
        with pytest.raises(DataError, match=name):
            loaded(tmp_path / "d.jsonl", known, columns=KEYS | {"answer": name})
    plain = example_of("row", {"question": "q", "a.b": "1", "a": {"b": "2"}}, ColumnsSection(answer="a.b"))
    assert plain.answer == "1", "a column of this very name comes first"


def test_null_keys_of_messages_do_not_reach_a_template() -> None:
    """Arrow's form of a conversation: every struct has the keys of all."""
    calls = [
        {**call, "function": {**call["function"], "arguments": {"x": None, "y": None} | call["function"]["arguments"]}} for call in CALLS
    ]
    nulls = {"content": None, "tool_calls": None, "tool_call_id": None, "name": None}
    padded = [{**nulls, **message} | ({"tool_calls": calls} if "tool_calls" in message else {}) for message in TALK]
    assert [example_of("row", {"question": talk, "answer": "1"}, ColumnsSection()).prompt for talk in (TALK, padded)] == [TALK, TALK]


@pytest.mark.parametrize(
    ("name", "content", "what", "got"),
    [
        ("d.csv", b"question,answer\nq,1\nq,1,2\n", "line 3", "3 cells"),
        ("d.csv", b"question,question,answer\na,b,c\n", "line 1", "'question' twice"),
        ("d.csv", b'question,answer\nq,"1\n', "line 2", "unexpected end of data"),
        ("d.csv", b"question,answer\ncaf\xe9,1\n", "d.csv", "utf-8"),
        ("d.csv", b"question,answer\n", "d.csv", "no rows"),
        ("d.tsv", b"question,answer\nq,1\n", "line 2, question", "nothing"),
        ("d.json", b'[{"question": "q", "answer": "1"}, 3]', "row 1", "int"),
        ("d.json", b'[{"question": "q"', "d.json", "invalid JSON"),
        ("d.jsonl.gz", b"no gzip", "d.jsonl.gz", "not a gzipped file"),
        ("d.csv.gz", gzip.compress(b"question,answer\nq,1\n", mtime=0)[:-9], "d.csv.gz", "end-of-stream"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, known: Tokenizer, name: str, content: bytes, what: str, got: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        loaded(tmp_path / name, known)
    assert what in refused.value.what
    assert got in str(refused.value.got)
    assert "\n" not in str(refused.value)


def test_a_text_file_has_no_other_split_and_a_missing_one_needs_no_package(tmp_path: Path, known: Tokenizer) -> None:
    with pytest.raises(DataError, match="none"):
        loaded(tmp_path / "none.csv", known)
    with pytest.raises(DataError) as refused:
        loaded(written(tmp_path / "d.csv"), known, split="test")
    assert (refused.value.what, refused.value.got) == ("task.split", "test")
