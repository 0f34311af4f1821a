"""The doctor's checks on simulated machines; the checks of a run on GPUs are in `test_launch_gpus`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from doctor_machines import GPUS, LAPTOP, NODE, SOURCES, but

from asyncmoe.doctor import versions
from asyncmoe.doctor.examination import CHECKS
from asyncmoe.doctor.facts import Machine, Nccl, Torch


def states(machine: Machine) -> dict[str, str]:
    return {name: check(machine).state for name, check in CHECKS.items()}


def test_healthy_machines_have_nothing_to_mend() -> None:
    of_run = dict.fromkeys(("megatron-switches", "placement", "gpu-memory"), "not here")
    assert states(NODE) == dict.fromkeys(CHECKS, "ok") | of_run
    of_gpus = dict.fromkeys(("cuda", "transformer-engine", "gpus", "nccl"), "not here")
    assert states(LAPTOP) == dict.fromkeys(CHECKS, "ok") | of_run | of_gpus


Case = tuple[str, Machine, dict[str, Any], str, str, str]
"""Line, machine, what is changed on it, state, part of what is found, part of the hint."""
BLIND = {"trainer__torch__shown": ()}

UNDEFINED = {"trainer__transformer_engine": False, "trainer__unfinished": "undefined symbol"}
CASES: list[Case] = [
    ("packages", NODE, {"trainer__packages": {"torch": None}}, "error", "torch is not installed", "make setup GPU=1"),
    ("packages", LAPTOP, {"trainer__packages": {"megatron-core": "0.20.0"}}, "error", "0.20.0, and has to be >=0.16.1,<0.20", "make setup"),
    ("torch", NODE, {"trainer__torch": None, "trainer__unfinished": "no libcudart"}, "error", "no libcudart", "make setup"),
    ("transformer-engine", NODE, {"trainer__packages": {"transformer-engine": None}}, "warning", "slower", "make transformer-engine GPU=1"),
    ("transformer-engine", NODE, UNDEFINED, "error", "undefined symbol", "uninstall it"),
    ("extension", LAPTOP, {"trainer__extension__trouble": "No module named _C"}, "error", "No module named _C", "make setup"),
    ("extension", LAPTOP, {"trainer__extension__built_from": ("0" * 64, SOURCES[1])}, "error", "other sources", "make setup"),
    ("extension", NODE, {"trainer__extension__cuda": False}, "error", "without CUDA kernels", "make setup GPU=1"),
    ("engine-python", NODE, {"engine__version": None, "engine__unfinished": "no such file"}, "error", "no such file", "engines.python"),
    ("engine-python", NODE, {"engine__extension__trouble": "asyncmoe is not found"}, "error", "asyncmoe is not found", ".pth"),
    ("sglang", NODE, {"engine__packages": {"sglang": "0.5.22"}}, "error", "0.5.22, and has to be ==0.5.23", "sglang==0.5.23"),
    ("cuda", NODE, {**BLIND, "trainer__cuda_driver": 11040}, "error", "12.8, and the driver takes up to 11.4", "driver to 525 or newer"),
    ("cuda", NODE, {"engine__torch": Torch("2.14.1", "13.0", "too old")}, "error", "CUDA 13.0, and the driver takes", "cuda-compat-13-0"),
    ("cuda", NODE, {**BLIND, "trainer__cuda_driver": None}, "error", "libcuda.so.1", "--gpus all"),
    ("cuda", NODE, {"engine__torch": None}, "not here", "the engines' torch cannot be imported", "engine-python"),
    ("gpus", NODE, {"trainer__torch__shown": NODE.trainer.torch.shown[:2]}, "ok", "of 81559 MiB, of which torch sees 2, driver 570", ""),
    ("gpus", NODE, {"nvidia__gpus": (replace(GPUS[0], mig=True), *GPUS[1:])}, "ok", "cut into MIG instances", ""),
    ("nccl", NODE, {"engine__nccl": Nccl()}, "error", "the engines' Python: it cannot be opened without asyncmoe's extension", "GPU=1"),
    ("nccl", NODE, {"engine": None}, "ok", "2.27.3", ""),
]


@pytest.mark.parametrize(("name", "machine", "changes", "state", "found", "hint"), CASES)
def test_a_line(name: str, machine: Machine, changes: dict[str, Any], state: str, found: str, hint: str) -> None:
    finding = CHECKS[name](but(machine, **changes))
    assert (finding.state, found in finding.line) == (state, True), finding
    assert hint in (finding.hint or ""), finding
    assert finding.hint is not None or state == "ok"


def test_versions() -> None:
    assert versions.within("0.16.1", ">=0.16.1,<0.20")
    assert versions.within("2.13.0+cpu", ">=2.6")
    assert versions.within("0.17.0rc1", ">=0.16.1,<0.20")
    assert not versions.within("0.20.0", ">=0.16.1,<0.20")
    assert not versions.within("from a branch", ">=1")
    assert (versions.nccl(22703), versions.cuda(12080), versions.cuda(13000)) == ("2.27.3", "12.8", "13.0")
