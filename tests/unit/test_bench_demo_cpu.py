"""Whose CPU time counts as what in a run of the demo."""

from __future__ import annotations

import pytest

from benchmarks.demo_cpu import role


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -m asyncmoe run examples/demo.yaml", "launcher"),
        ("python -m asyncmoe engine RUN/config.yaml", "launcher"),
        ("python -m asyncmoe rollout RUN/config.yaml", "controller"),
        ("python -m torch.distributed.run -m asyncmoe.trainer RUN/config.yaml", "launcher"),
        ("python -m asyncmoe.launch.torchrun --nproc-per-node 2 -m asyncmoe.trainer RUN/config.yaml", "launcher"),
        ("python -u -m asyncmoe.trainer RUN/config.yaml", "trainer"),
        ("python -m asyncmoe.platform.sglang --model-path RUN/model", "engine"),
        ("sglang::scheduler", "engine"),
    ],
)
def test_roles_of_processes(command: str, expected: str) -> None:
    assert role(command.split()) == expected
