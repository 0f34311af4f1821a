"""What a user gets wrong: one clear line, a non-zero status, nothing left running and nothing half-written."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.system.runs import SMALL, refused

pytestmark = pytest.mark.system
DEMO = "examples/demo.yaml"


def arguments(tmp_path: Path, *overrides: str) -> tuple[str, ...]:
    return ("run", DEMO, f"run.dir={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", *SMALL, *overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.tpp=2", ["trainer.tpp", "unknown key", "tp, pp, ep"]),
        ("trainer.tp=two", ["trainer.tp", "'two'", "integer"]),
        ("trainer.ranks=3", ["trainer.ranks", "got 3", "multiple of"]),
        ("rollout.group_size=1", ["rollout.group_size", "got 1", "at least 2"]),
        ("task.kind=poetry", ["task.kind", "'poetry'", "arithmetic"]),
    ],
)
def test_a_wrong_key_value_or_combination_is_named(tmp_path: Path, override: str, words: list[str]) -> None:
    line = refused(*arguments(tmp_path, override))
    assert all(word in line for word in words), line
    assert not (tmp_path / "model").exists()


def test_tensor_parallelism_must_divide_the_heads(tmp_path: Path) -> None:
    line = refused(*arguments(tmp_path, "trainer.tp=3", "trainer.ranks=3", "trainer.ep=1"))
    assert "trainer.tp" in line
    assert "got 3" in line
    assert "heads" in line


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    line = refused(*arguments(tmp_path, "model.make=null"))
    assert str(tmp_path / "model") in line
    assert "expected" in line


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    assert "no such file" in refused("run", str(tmp_path / "none.yaml"))


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(*arguments(tmp_path, f"engines.port={port}"))
    assert str(port) in line
    assert "in use" in line


def test_an_engine_that_dies_at_start_says_why(tmp_path: Path) -> None:
    line = refused(*arguments(tmp_path, "engines.args=['--no-such-argument']"))
    assert "no-such-argument" in line
    assert "engine" in line


def test_a_broken_line_of_a_data_file_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1?", "answer": "#### 2"}\n{"question": "broken\n')
    line = refused(*arguments(tmp_path, "task.kind=jsonl", f"task.path={data}"))
    assert "data.jsonl" in line
    assert "line 2" in line


def test_an_unknown_reward_function_is_named(tmp_path: Path) -> None:
    line = refused(*arguments(tmp_path, "scoring.scorer=nowhere.module:reward"))
    assert "nowhere.module" in line
