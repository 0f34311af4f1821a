"""The files a resumed run reads again are unchanged, or the run is refused with the key's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncmoe import config as configuration
from asyncmoe.config import Config
from asyncmoe.errors import UserError
from asyncmoe.models import origin
from tests.unit.test_checkpoints import saved

ROWS = "".join(f'{{"question": "{number} + 1", "answer": "{number + 1}"}}\n' for number in range(9))
LORA = {"train": "lora", "lora": {"start": "adapter"}}
SETS = {"every": 1, "sets": {"hard": {"kind": "jsonl", "path": "data/hard.jsonl", "samples": 2}, "held": {"prompts": 3}}}
Change = Callable[[], object]


def begun(folder: Path, **more: Any) -> Config:
    """A run with a checkpoint of step 4, in the working directory."""
    files = {"model/config.json": "{}", "model/tokenizer.json": "a", "model/chat_template.jinja": "b", "model/README.md": "c"}
    files |= {"model/model.safetensors": "weights", "adapter/adapter_model.safetensors": "half", "data/rows.jsonl": ROWS}
    for name, text in (files | {"data/hard.jsonl": ROWS}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    config = parsed(**more)
    (saved(config.run.dir, 4) / "asyncmoe.json").write_text(json.dumps({"step": 4, "origin": origin.origin_of(config)}))
    return config


def parsed(**more: Any) -> Config:
    given = {"task": {"kind": "jsonl", "path": "data/rows.jsonl"}, "model": {"path": "model"}, **more}
    return configuration.parse({**given, "run": {"dir": "run", "steps": 9, **more.get("run", {})}})


def write(name: str, text: str) -> Change:
    return lambda: Path(name).write_text(text)


ANOTHER = ROWS.replace("7 + 1", "7 - 1")
WEIGHTS, HINT = write("model/model.safetensors", "Weights"), "run.new_data_at=4"


@pytest.mark.parametrize(
    ("before", "change", "after", "told"),
    [
        (LORA, WEIGHTS, LORA, "model.path weights: got 7 bytes with digest "),
        ({"objective": {"kl": {"coefficient": 0.1}}}, WEIGHTS, {"objective": {"kl": {"coefficient": 0.2}}}, "model.path weights: got "),
        ({}, WEIGHTS, {}, ""),
        ({}, write("model/chat_template.jinja", "B"), {}, "model.path chat_template.jinja: got 1 bytes with "),
        ({}, write("model/vocab.txt", "B"), {}, "model.path vocab.txt: got 1 bytes with digest "),
        ({}, write("model/config.json", '{"rope_theta": 1}'), {}, "model.path config.json: got "),
        ({}, write("model/README.md", "C"), {}, ""),
        (LORA, write("adapter/adapter_model.safetensors", "Half"), LORA, "lora.start: got 4 bytes with digest "),
        ({}, write("data/rows.jsonl", ANOTHER), {}, HINT),
        ({}, write("data/rows.jsonl", ANOTHER), {"run": {"new_data_at": 4}}, ""),
        ({}, write("data/rows.jsonl", ANOTHER), {"run": {"new_data_at": 3}}, HINT),
        ({}, write("elsewhere.jsonl", ROWS), {"task": {"kind": "jsonl", "path": "elsewhere.jsonl"}}, ""),
        ({}, lambda: Path("model").rename("renamed"), {"model": {"path": "renamed"}}, ""),
        ({}, lambda: Path("data").rename("d"), {"task": {"kind": "jsonl", "path": "d/rows.jsonl"}}, ""),
        ({}, lambda: None, {"task": {"kind": "jsonl", "path": "none/rows.jsonl"}}, "task.path: got none/rows.jsonl: No such file or dir"),
        ({}, lambda: None, {"task": {"kind": "arithmetic", "difficulty": 3}}, "task.difficulty: got 3, expected 1 (the default), as "),
        ({"evaluation": SETS}, write("data/hard.jsonl", ANOTHER), {"evaluation": SETS}, "evaluation.sets.hard.path: got 333 bytes "),
        ({"evaluation": SETS}, lambda: None, {"evaluation": {**SETS, "temperature": 0.5, "every": 7}}, ""),
        ({}, lambda: None, {"evaluation": {"every": 1}}, "evaluation.every: got above 0, expected 0 (the default), as step-"),
        ({"evaluation": {"every": 1}}, lambda: None, {"evaluation": {"every": 1, "prompts": 5}}, "evaluation.prompts: got 5, expected "),
        ({}, lambda: None, {"warmup": {"steps": 2}}, "warmup.steps: got 2, expected 0, as step-00000004 has it; set it back, or choose an"),
        ({"warmup": {"steps": 2}}, lambda: None, {"warmup": {"steps": 2, "batch": 8}}, "warmup.batch: got 8, expected 64, as step-0"),
        ({}, lambda: None, {"rollout": {"groups_per_step": 3}}, "rollout.groups_per_step: got 3, expected "),
        ({}, lambda: None, {"trainer": {"optimizer": {"lr": 1}}, "rollout": {"group_size": 3}}, ""),
    ],
)
def test_what_is_not_what_it_was_is_refused(
    before: dict[str, Any], change: Change, after: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    newest = begun(tmp_path, **before).run.dir / "checkpoints" / "step-00000004"
    change()
    try:
        said = "\n".join(map(str, origin.differing_reads(parsed(**after), newest)))
    except UserError as error:
        said = str(error)
    assert told in said
    assert bool(told) == bool(said)


def test_large_files_are_compared_by_samples_and_nothing_that_was_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = begun(tmp_path)
    monkeypatch.setattr(origin, "_WHOLE_BYTES", 1 << 16)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(bytes(100 << 20))
    before = origin.origin_of(config)
    weights.write_bytes(bytes(50 << 20) + b"\1" * (50 << 20))
    assert origin.origin_of(config)["model.path weights"] != before["model.path weights"]
    (saved(config.run.dir, 5) / "asyncmoe.json").write_text('{"step": 5}')
    assert not [*origin.differing_reads(config, config.run.dir / "checkpoints" / "step-00000005")]
