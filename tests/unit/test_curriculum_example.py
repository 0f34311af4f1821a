"""The curriculum of `examples/real/curriculum.py` prefers questions that some responses pass and others fail."""

from __future__ import annotations

import asyncio
import importlib
from collections import Counter
from pathlib import Path

import pytest

from asyncmoe.config import load
from asyncmoe.rollout import tasks
from asyncmoe.rollout.tasks.order import EVALUATION
from tests.unit import openai_policy

ROOT = Path(__file__).parents[2]


def test_what_always_or_never_passes_is_asked_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    config = load(ROOT / "examples" / "real" / "curriculum.yaml")
    module = importlib.import_module("examples.real.curriculum")
    monkeypatch.setattr(module, "NOTES", tmp_path / "passed.txt")
    loaded = tasks.load(config, openai_policy.tokenizer(tmp_path))
    held = [loaded.sets[0].task.prompt(n, EVALUATION).text for n in range(30)]
    asked = Counter[int]()

    async def run() -> None:
        for group in range(400):
            prompt = loaded.training.prompt(group)
            digits = prompt.columns["digits"]
            asked[digits] += group >= 200
            for episode in range(8):
                right = digits == 1 or (digits == 2 and episode % 2 == 0)
                assert await module.score("", prompt.answer if right else "no", prompt.answer, prompt.columns) == right

    asyncio.run(run())
    assert asked[2] > 3 * max(asked[1], asked[3])
    assert min(asked.values()) > 0
    assert held == [loaded.sets[0].task.prompt(n, EVALUATION).text for n in range(30)], "an evaluation asks the same throughout"
