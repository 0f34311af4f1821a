"""Runs on machines whose GPUs are not all alike, free, whole or in nvidia-smi's order: only the GPUs that a run takes count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from doctor_machines import GPUS, NODE, but, shown
from test_launch_gpus import H200, configured, machine

from asyncmoe.doctor.facts import GpuFacts, Machine
from asyncmoe.errors import UserError
from asyncmoe.launch import preflight
from asyncmoe.platform.kernels import Kernels

H100 = GPUS[0]
T400 = GpuFacts(0, "NVIDIA T400 4GB", 4096, 4, "Default", "7.5")
T4 = GpuFacts(0, "Tesla T4", 15360, 4, "Default", "7.5")
V100 = GpuFacts(0, "Tesla V100-SXM2-32GB", 32768, 4, "Default", "7.0")
A100 = GpuFacts(0, "NVIDIA A100-SXM4-80GB", 81920, 4, "Default", "8.0")
GB10 = GpuFacts(0, "NVIDIA GB10", 0, 4, "Default", "12.1")
PROHIBITED, EXCLUSIVE = replace(H100, compute_mode="Prohibited"), replace(H100, compute_mode="Exclusive_Process")
SLICED, BUSY = replace(H100, mig=True), replace(H100, used_mib=60000)
ONE, TWO = "demo-gpu.yaml", "demo-gpus.yaml"
FULL = "one-node/qwen3-30b-a3b.yaml"


PLAIN = Kernels(cuda=True, capability=(9, 0))
"""What a machine without optional kernels has."""


def node(name: str, found: list[GpuFacts], *overrides: str, sees: tuple[int, ...] | None = None, **changes: Any) -> Machine:
    """A node with these cards, examined for an example; `sees`: nvidia-smi's numbers of those that torch sees, in CUDA's order."""
    numbered = tuple(replace(gpu, index=index, uuid=f"GPU-{index:08x}") for index, gpu in enumerate(found))
    seen = numbered if sees is None else [numbered[number] for number in sees]
    base = but(machine(*configured(name, *overrides), len(found), H100), nvidia__gpus=numbered, trainer__torch__shown=shown(*seen))
    return but(base, **changes) if changes else base


def instance(gibibytes: int, name: str = "NVIDIA H100 80GB HBM3 MIG 3g.40gb") -> tuple[GpuFacts, ...]:
    """What torch says of an instance of a GPU."""
    return (GpuFacts(None, name, gibibytes << 10, capability="9.0", uuid="GPU-31c1"),)


@pytest.mark.parametrize(
    ("found", "changes"),
    [
        pytest.param([H100, H100, T400], {}, id="a small card"),
        pytest.param([H100, H100, replace(T4, used_mib=12000)], {}, id="an old and busy card"),
        pytest.param([H100, H100, PROHIBITED], {}, id="a prohibited card"),
        pytest.param([H100, H100, PROHIBITED], {"nvidia__chosen": ("0", "1"), "sees": (0, 1)}, id="a hidden prohibited card"),
        pytest.param([BUSY, *[H100] * 7], {"nvidia__chosen": ("6", "7"), "sees": (6, 7)}, id="a hidden busy card"),
        pytest.param([EXCLUSIVE, EXCLUSIVE], {}, id="one process to a GPU, and one process on each"),
        pytest.param([GB10, GB10], {"trainer__torch__shown": instance(80) * 2}, id="memory that nvidia-smi does not tell"),
    ],
)
def test_what_does_not_concern_the_run_is_not_spoken_of(found: list[GpuFacts], changes: dict[str, Any]) -> None:
    assert preflight.judge(node(TWO, found, **changes)) == ()


REFUSED: list[tuple[Callable[[], Machine], str]] = [
    (lambda: node(FULL, [H100] * 6 + [H200] * 2), "memory of GPU 0: 101 GB of the trainer ("),
    (lambda: node(TWO, [H100, PROHIBITED]), "compute mode of GPU 1 is Prohibited"),
    (lambda: node(ONE, [EXCLUSIVE]), "compute mode of GPU 0 is Exclusive_Process, and the trainer and an engine share GPU 0"),
    (lambda: node(ONE, [GB10], trainer__torch__shown=instance(10)), "14.8 GB of the trainer and an engine"),
    (lambda: node(TWO, [V100] * 2), "GPUs 0, 1 of compute capability 7.0"),
    (lambda: node(TWO, [A100] * 2, trainer__extension__architectures=("90", "100")), "the extension's kernels are not built"),
    (lambda: node(TWO, [BUSY, *[H100] * 7], nvidia__chosen=("6", "0"), sees=(6, 0)), "60000 MiB of GPU 1 (nvidia-smi: 0)"),
    (lambda: node(TWO, [H100] * 8, nvidia__chosen=("1",), sees=(1,)), "1 (CUDA_VISIBLE_DEVICES hides 7 more)"),
    (lambda: node(TWO, [H100] * 2, "trainer.megatron.moe_token_dispatcher_type=flex"), "moe_token_dispatcher_type: flex"),
    (lambda: node(FULL, [*[H200] * 7, H100]), "engine 0 would compute on NVIDIA H100 80GB HBM3 of 81559 MiB and NVIDIA H200"),
]


@pytest.mark.parametrize(("make", "got"), REFUSED)
def test_what_stops_a_run_is_one_line(make: Callable[[], Machine], got: str) -> None:
    with pytest.raises(UserError) as caught:
        preflight.judge(make())
    assert caught.value.what.endswith(" of node01")
    assert got in str(caught.value.got)
    assert "\n" not in str(caught.value)


def test_without_a_configuration_what_would_stop_a_run_is_a_warning_and_one_does_not_hide_another() -> None:
    (line,) = preflight.judge(but(NODE, nvidia__gpus=(PROHIBITED, replace(GPUS[1], used_mib=70000), *GPUS[2:])))
    for words in ("compute mode of GPU 0 is Prohibited", "other processes use up to 70000 MiB of GPU 1", "nvidia-smi -i 0 -c DEFAULT"):
        assert words in line
