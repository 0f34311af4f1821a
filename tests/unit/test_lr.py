"""The learning rate at every step."""

from __future__ import annotations

import pytest

from asyncmoe.config.trainer import OptimizerSection
from asyncmoe.trainer.model.lr import lr_at


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.914058, 0.689058, 0.410942, 0.185942, 0.1, 0.1]),
    ],
)
def test_rises_then_decays_to_the_minimum_after_the_last_step(decay: str, expected: list[float]) -> None:
    section = OptimizerSection.model_validate({"lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "decay": decay})
    assert [lr_at(step, section, 7) for step in (*range(8), 99)] == pytest.approx(expected, abs=1e-6)
