"""asyncmoe bench peers, as far as it needs no engine and no TRL: who counts as what, and what is reported of an arm's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncmoe import config as configuration
from asyncmoe.errors import UserError
from asyncmoe.rpc.environment import STAND_BY
from benchmarks.small_scale import ours, run
from benchmarks.small_scale.case import DEMO, SETTLE, Told, figures
from benchmarks.small_scale.task import Digits, share


@pytest.mark.parametrize(
    ("command", "stands_by", "expected"),
    [
        ("python -m asyncmoe run examples/demo.yaml", False, "launcher"),
        ("python -m asyncmoe.launch.keep RUN/config.yaml", False, "launcher"),
        ("python -m asyncmoe rollout RUN/config.yaml", False, "controller"),
        ("python -m asyncmoe rollout RUN/config.yaml", True, "stand_by"),
        ("python -m torch.distributed.run -m asyncmoe.trainer RUN/config.yaml", False, "launcher"),
        ("python -m asyncmoe.launch.torchrun --nproc-per-node 2 -m asyncmoe.trainer RUN/config.yaml", False, "launcher"),
        ("python -u -m asyncmoe.trainer RUN/config.yaml", False, "trainer"),
        ("python -u -m asyncmoe.trainer RUN/config.yaml", True, "stand_by"),
        ("python -m asyncmoe.platform.sglang --model-path RUN/model", False, "engine"),
        ("sglang::scheduler", False, "engine"),
    ],
)
def test_roles_of_processes(command: str, stands_by: bool, expected: str) -> None:
    assert ours.role(command.split(), {STAND_BY: "x"} if stands_by else {}) == expected


def test_figures_of_an_arm_leave_out_its_first_steps() -> None:
    steps = [Told(float(i if i < SETTLE else 2 * i), {"trl": 100.0 * (i < SETTLE) + i}, 0.1 * i, 5.0 + (i < SETTLE)) for i in range(12)]
    found = figures(steps, 10)
    spent, seconds = (11 - (100 + SETTLE - 1)) / (10 * (12 - SETTLE)), 22 - (SETTLE - 1)
    assert found["cpu_ms"] == {"trl": pytest.approx(1e3 * spent, abs=1e-3)}
    assert found["samples_per_s"] == pytest.approx(10 * (12 - SETTLE) / seconds, abs=0.05)
    assert found["tokens"] == 5.0
    assert (found["reached_step"], found["reached_s"]) == (10, 18.0)
    assert figures(steps[:8], 10)["reached_step"] is None


def test_both_sides_reward_the_same() -> None:
    assert share("", 6) == 0.0
    assert share("12a4", 6) == 0.5
    assert share("1" * 9, 6) == 1.0, "a token may be more than one character"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", run.CASES, ids=lambda case: case.name)
def test_the_arms_have_one_configuration(case: Any, ranks: int, tmp_path: Path) -> None:
    config = configuration.load(DEMO, [f"run.dir={tmp_path}/run", *case.settings(tmp_path, ranks)])
    assert (config.trainer.ranks, config.trainer.ep, config.rollout.max_new_tokens) == (ranks, ranks, case.longest)
    assert config.run.steps > case.steps, "a run that has ended has no engine to ask alone"
    assert isinstance(Digits(**config.scoring.options), Digits)


def test_words_that_name_nothing() -> None:
    for arguments in (["medium"], []), (["short"], ["ours_3"]):
        with pytest.raises(UserError, match="expected one of"):
            run.run(*arguments)
    with pytest.raises(UserError, match="do not count"):
        run.run(["short"], ["ours_1"], steps=SETTLE)
