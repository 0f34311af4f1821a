"""Whose CPU time counts as what in a run of the demo."""

from __future__ import annotations

import pytest

from asyncmoe.rpc.environment import STAND_BY
from benchmarks.demo_cpu import role


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
    assert role(command.split(), {STAND_BY: "x"} if stands_by else {}) == expected
