"""Data sets of Hugging Face's `datasets`: files, saved ones, and the line for each mistake."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("datasets") is None:
    pytest.skip("run: make test-integrations ONLY=datasets", allow_module_level=True)

import datasets
import pandas
import pyarrow
from pyarrow import csv, ipc, parquet

from asyncmoe.config import Config
from asyncmoe.errors import DataError
from asyncmoe.rollout import tasks
from asyncmoe.rollout.tasks import datasets_reader
from asyncmoe.rollout.tasks.order import EVALUATION
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.configs import minimal
from tests.unit import file_rows

ROWS = [{"question": f"q{n}", "answer": str(n), "level": ("easy", "hard")[n % 2], "tests": [n, n + 1]} for n in range(20)]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    datasets.config.HF_DATASETS_CACHE = str(tmp_path_factory.mktemp("cache"))


def config(path: Path | str, evaluation: dict[str, object] | None = None, **task: object) -> Config:
    source = {"kind": "dataset", "path": str(path), "chat_template": False, **task}
    return minimal(task=source, evaluation={"every": 1, **evaluation} if evaluation else {})


def written(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix in (".json", ".jsonl"):
        path.write_bytes(file_rows.text_of(path.suffix, rows))
    else:
        parquet.write_table(table, path.with_suffix(".parquet"))
        data = datasets.load_dataset("parquet", data_files=str(path.with_suffix(".parquet")), split="train")
        datasets.DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(str(path))
    return path


def folder_of(path: Path, suffix: str) -> None:
    path.mkdir()
    table = file_rows.FLAT if suffix == ".csv" else file_rows.NESTED
    (path / f"train{suffix}").write_bytes(file_rows.text_of(suffix, table))


def as_ipc(path: Path, new: Any) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, new(file, ARROW.schema) as writer:
        writer.write_table(ARROW)


FRAME = pandas.DataFrame(file_rows.FLAT)
OF_DICTS = pandas.DataFrame(file_rows.NESTED)
ARROW = pyarrow.Table.from_pylist(file_rows.NESTED)
WAYS: dict[str, Callable[[Path], object]] = {
    "pandas.csv": lambda path: FRAME.to_csv(path, index=False),
    "pandas.csv.gz": lambda path: FRAME.to_csv(path, index=False),
    "pandas.tsv": lambda path: FRAME.to_csv(path, index=False, sep="\t"),
    "pandas.json": lambda path: OF_DICTS.to_json(path, orient="records"),
    "pandas.lines.json": lambda path: OF_DICTS.to_json(path, orient="records", lines=True),
    "pandas.parquet": lambda path: OF_DICTS.to_parquet(path),
    "flat.parquet": lambda path: FRAME.to_parquet(path),
    "pyarrow.csv": lambda path: csv.write_csv(pyarrow.Table.from_pylist(file_rows.FLAT), path),
    "pyarrow.parquet": lambda path: parquet.write_table(ARROW, path),
    "stream.arrow": lambda path: as_ipc(path, ipc.new_stream),
    "file.arrow": lambda path: as_ipc(path, ipc.new_file),
    "saved": lambda path: datasets.Dataset(ARROW).save_to_disk(str(path)),
    "of_parquet": lambda path: parquet.write_to_dataset(ARROW, path),
    "of_json": lambda path: folder_of(path, ".json"),
    "of_csv": lambda path: folder_of(path, ".csv"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_file_gives_the_same_rows_and_text_stays_text(tmp_path: Path, known: Tokenizer, way: str) -> None:
    WAYS[way](tmp_path / way)
    task = tasks.load(config(tmp_path / way, columns=file_rows.KEYS), known).training
    found = {prompt.text: (prompt.answer, prompt.columns) for prompt in map(task.prompt, range(20))}
    assert found == {row["question"]: (row["reward_model"]["ground_truth"].strip(), {"level": row["level"]}) for row in file_rows.NESTED}


@pytest.mark.parametrize("name", ["d.parquet", "d.json", "d.jsonl", "saved"])
def test_nested_messages_are_the_same_in_every_format(tmp_path: Path, known: Tokenizer, name: str) -> None:
    """Arrow's structs have null in place of keys that only other messages have."""
    path = written(tmp_path / name, [{"prompt": file_rows.TALK, "answer": "1", "tests": []}] * 3)
    if name == "d.parquet":
        assert None in parquet.read_table(path).to_pylist()[0]["prompt"][0].values()
    source = datasets_reader.read(config(path, columns={"question": "prompt", "keep": []}).task.mixture[0], "task")
    assert source[0].prompt == file_rows.TALK


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl", "saved"])
def test_rows_are_chosen_and_come_in_the_same_order_again(tmp_path: Path, known: Tokenizer, name: str) -> None:
    made = config(written(tmp_path / name), where={"level": "hard"})
    task = tasks.load(made, known).training
    prompts = [task.prompt(n) for n in range(20)]
    assert sorted(prompt.text for prompt in prompts[:10]) == sorted(f"q{n}" for n in range(1, 20, 2))
    for prompt in prompts:
        assert prompt.columns == {"level": "hard", "tests": [int(prompt.answer), int(prompt.answer) + 1]}
        assert prompt.text == f"q{prompt.answer}"
    again = tasks.load(made, known).training
    assert [again.prompt(n) for n in (13, 2, 19)] == [prompts[n] for n in (13, 2, 19)]


def test_splits_of_a_saved_data_set(tmp_path: Path, known: Tokenizer) -> None:
    path = written(tmp_path / "saved")
    task = tasks.load(config(path, split="test"), known).training
    assert {task.prompt(n).text for n in range(6)} == {"q0", "q1", "q2"}
    with pytest.raises(DataError, match=r"task\.split: got validation, expected one of train, test, the splits of .*saved"):
        tasks.load(config(path, split="validation"), known)
    with pytest.raises(DataError, match=r"task\.path .*d\.parquet: got ValueError: Unknown split \"test\""):
        tasks.load(config(written(tmp_path / "d.parquet"), split="test"), known)


def test_an_evaluation_set_is_another_split(tmp_path: Path, known: Tokenizer) -> None:
    path = written(tmp_path / "saved")
    sets = {"sets": {"test": {"split": "test"}}}
    loaded = tasks.load(config(path, sets), known)
    (one,) = loaded.sets
    assert {one.task.prompt(n, EVALUATION).text for n in range(one.count)} == {"q0", "q1", "q2"}
    assert {loaded.training.prompt(n).text for n in range(60)} == {f"q{n}" for n in range(3, 20)}


@pytest.mark.parametrize(
    ("rows", "keys", "said"),
    [
        ([{"problem": "q", "answer": "1"}], {}, r"row 0, question: got nothing, .*its columns are problem, answer"),
        ([{"question": "q", "answer": "1"}, {"question": "q", "answer": None}], {}, r"row 1, answer: got None"),
        ([{"question": "q", "answer": "1", "image": b"\xff"}], {}, r"row 0, column image: got Object of type bytes"),
        ([{"question": "q", "answer": "1"}], {"where": {"answer": "2"}}, r"d\.parquet: got no row left"),
        ([{"question": "q", "answer": "1"}], {"filter": "tests.unit.task_sources:easy"}, r"row 0: got .*KeyError: 'level' at tests/unit/"),
    ],
)
def test_rows_that_cannot_be_used_are_named(
    tmp_path: Path, known: Tokenizer, rows: list[dict[str, Any]], keys: dict[str, Any], said: str
) -> None:
    assert re.search(said, refused(config(written(tmp_path / "d.parquet", rows), **keys), known))


def refused(made: Config, known: Tokenizer) -> str:
    with pytest.raises(DataError) as caught:
        tasks.load(made, known)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_columns_that_nothing_reads_may_be_anything(tmp_path: Path, known: Tokenizer) -> None:
    path = written(tmp_path / "d.parquet", [{"question": "q", "answer": "1", "image": b"\xff", "n": 3}])
    task = tasks.load(config(path, columns={"keep": ["n"]}), known).training
    assert task.prompt(0).columns == {"n": 3}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("d.parquet", b"no parquet", r"task\.path .*d\.parquet: got ArrowInvalid: "),
        ("d.txt", b"x", r"d\.txt: got the suffix '\.txt', expected \.jsonl, \.json, \.csv"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, known: Tokenizer, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(said, refused(config(tmp_path / name), known))
    assert "none.parquet: got no such file or directory" in refused(config(tmp_path / "none.parquet"), known)


def test_an_id_on_the_hub_without_a_network_is_refused_at_once(tmp_path: Path, known: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"task\.path: got org/data: no such path here, and http://127\.0\.0\.1:9 cannot be reached"):
        tasks.load(config("org/data"), known)
    assert time.monotonic() - begin < 15
