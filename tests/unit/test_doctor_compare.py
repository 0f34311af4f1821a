"""The versions that `asyncmoe doctor --json` prints of a node: those in which the nodes of a run must agree."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_machines import LAPTOP, NODE, SOURCES, but

from asyncmoe.doctor.examination import versions_of


@pytest.mark.parametrize(
    ("path", "value", "what", "found"),
    [
        ("asyncmoe", "0.1.0 (ba9876543210)", "asyncmoe", "0.1.0 (ba9876543210)"),
        ("trainer__version", "3.12.1", "version of the trainer's Python", "3.12.1"),
        ("trainer__packages", {"transformer-engine": None}, "transformer-engine of the trainer's Python", "none"),
        ("trainer__torch__cuda", "13.0", "CUDA of torch of the trainer's Python", "13.0"),
        (
            "trainer__extension__built_from",
            ("0" * 64, SOURCES[1]),
            "sources of asyncmoe's extension of the trainer's Python",
            f"{'0' * 12} {SOURCES[1][:12]}",
        ),
        ("engine__nccl__version", 22809, "NCCL of the engines' Python", "2.28.9"),
        ("nvidia__driver", "570.9.1", "NVIDIA's driver", "570.9.1"),
    ],
)
def test_a_node_that_deviates_has_another_value(path: str, value: Any, what: str, found: str) -> None:
    usual, other = versions_of(NODE, "d1" * 32), versions_of(but(NODE, **{path: value}), "d1" * 32)
    assert {name: one for name, one in other.items() if one != usual[name]} == {what: found}


def test_a_node_lacks_what_another_role_need_not_have() -> None:
    plain = versions_of(but(NODE, nvidia=LAPTOP.nvidia, trainer__nccl=LAPTOP.trainer.nccl, engine__nccl=None), None)
    assert versions_of(NODE, "d1" * 32).keys() - plain.keys() == {
        "configuration",
        "NVIDIA's driver",
        "NCCL of the trainer's Python",
        "NCCL of the engines' Python",
    }
