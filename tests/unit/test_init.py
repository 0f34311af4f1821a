"""`asyncmoe init`: a configuration for a model, a data set and a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncmoe.config import Config, devices, load
from asyncmoe.config.task import ColumnsSection
from asyncmoe.errors import ConfigError, DataError
from asyncmoe.launch import gpus
from asyncmoe.plan import budget
from asyncmoe.rollout import tasks
from asyncmoe.rollout.tokenizer import Tokenizer
from tests.configs import without_template
from tests.unit.command_line import run_command

MODELS = Path(__file__).parents[2] / "examples" / "cluster" / "models"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what this machine has: no GPU, unless told otherwise."""

    def has(count: int, gpu_gb: float) -> None:
        monkeypatch.setattr(gpus, "here", lambda: (count, gpu_gb))

    has(0, 0.0)
    return has


def written(folder: Path, model: Path, row: dict[str, Any], count: int = 40) -> Config:
    """The configuration for this many copies of a row whose questions differ."""
    data, out = folder / "rows.jsonl", folder / "made.yaml"
    data.write_text("".join(json.dumps(row).replace("N", str(number)) + "\n" for number in range(count)))
    assert run_command(["init", "--model", str(model), "--data", str(data), str(out)], catch_exceptions=False).exit_code == 0
    assert 15 <= len(out.read_text().splitlines()) <= 30
    return load(out)


TALK = [{"role": "user", "content": "What is N + 1?"}]
ROWS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"question": "N?", "answer": "2 + 3 = 5 #### 5", "level": 1}, "question", "answer", "math_verify"),
    ({"id": "N", "problem": "N?", "solution": "Paris"}, "problem", "solution", "math_verify"),
    ({"prompt": TALK, "ground_truth": 0, "answer": "", "solution": "1 + 1"}, "prompt", "ground_truth", "math_verify"),
    ({"prompt": TALK, "reward_model": {"style": "rule", "ground_truth": "34"}}, "prompt", "reward_model.ground_truth", "math_verify"),
    ({"question": None, "messages": TALK, "answer": "x" * 10_000}, "messages", "answer", "exact"),
]


@pytest.mark.parametrize(("row", "question", "answer", "scorer"), ROWS)
def test_usual_columns_are_found(tmp_path: Path, model: Path, row: dict[str, Any], question: str, answer: str, scorer: str) -> None:
    made = written(tmp_path, model, row)
    assert made.task.columns == ColumnsSection(question=question, answer=answer)
    assert made.scoring.scorer == scorer


@pytest.mark.parametrize("count", [1, 40, 1000])
def test_a_run_takes_the_data(tmp_path: Path, model: Path, count: int) -> None:
    asked = tasks.load(written(tmp_path, model, ROWS[0][0], count), Tokenizer(model))
    assert asked.training.prompt(0).answer == "5"
    assert sum(one.count for one in asked.sets) == min(64, count // 4)


@pytest.mark.parametrize(
    ("count", "gpu_gb", "name", "train"),
    [(1, 80, "smollm2", "full"), (1, 288, "Qwen3-30B-A3B", "lora"), (8, 80, "Qwen3-30B-A3B", "lora"), (8, 288, "Qwen3-30B-A3B", "full")],
)
def test_all_fit_on_the_gpus(tmp_path: Path, model: Path, machine: Any, count: int, gpu_gb: int, name: str, train: str) -> None:
    machine(count, gpu_gb)
    folder = without_template(model, tmp_path / "model")
    (folder / "config.json").write_bytes((MODELS / f"{name}.json").read_bytes())
    made = written(tmp_path, folder, ROWS[0][0])
    assert made.train == train
    assert not budget.of_run(made, budget.hf_of(made), gpu_gb).refusals
    assert max(devices.place(devices.wanted(made, several=False)[0], count).taken) < count
    machine(2, 24.0)
    (folder / "config.json").write_bytes((MODELS / "Qwen3-235B-A22B.json").read_bytes())
    (tmp_path / "made.yaml").unlink()
    with pytest.raises(ConfigError, match="this machine: got 1 GPUs of 24 GB"):
        written(tmp_path, folder, ROWS[0][0])
    assert not (tmp_path / "made.yaml").exists()


def test_lines_of_a_family_are_written_only_where_it_needs_them(tmp_path: Path, model: Path) -> None:
    base = without_template(model, tmp_path / "base")
    own = without_template(model, tmp_path / "own", chat_template="{{ messages }}", auto_map={})
    found = []
    for each in (model, base, own):
        made = written(tmp_path, each, ROWS[0][0])
        found.append((made.model.trust_remote_code, made.task.chat_template))
        (tmp_path / "made.yaml").unlink()
    assert found == [(False, True), (False, False), (True, True)]


def test_what_it_cannot_use_is_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(DataError, match="no answers; columns besides the question: level, source"):
        written(tmp_path, model, {"question": "N?", "level": None, "source": None})
    with pytest.raises(DataError, match="its columns are text, label"):
        written(tmp_path, model, {"text": "N?", "label": 1})
    (tmp_path / "made.yaml").write_text("mine")
    with pytest.raises(DataError, match="an existing path"):
        written(tmp_path, model, ROWS[0][0])
    assert (tmp_path / "made.yaml").read_text() == "mine"
