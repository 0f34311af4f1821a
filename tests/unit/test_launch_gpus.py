"""Runs on 1, 2, 4, 8, 16 and 128 GPUs: which GPU every process has, what it may hold there, and what stops a run before it starts; also on
machines whose GPUs are not all alike, free, whole or in nvidia-smi's order: only the GPUs that a run takes count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from doctor_machines import GPUS, NODE, but, shown

from asyncmoe import models
from asyncmoe.config import Config, devices, load
from asyncmoe.doctor.facts import GpuFacts, Machine
from asyncmoe.doctor.planned import PlannedRun
from asyncmoe.engines.sglang import process as engine_process
from asyncmoe.errors import ConfigError, UserError
from asyncmoe.launch import evaluate, gpus, preflight
from asyncmoe.occupancy import DeviceTurn
from asyncmoe.plan import budget
from asyncmoe.trainer.model import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = EXAMPLES / "cluster" / "models"
H200 = GpuFacts(0, "NVIDIA H200", 143771, 4, "Default", "9.0")

Setup = tuple[str, int, GpuFacts, tuple[int, ...]]
"""An example, GPUs of each of its nodes, their kind, and how many processes of the run each kind of node has GPUs for."""
SETUPS: dict[int, list[Setup]] = {
    1: [("demo-gpu.yaml", 1, GPUS[0], (2,)), ("one-node/colocated-1-gpu.yaml", 1, GPUS[0], (2,))],
    2: [("demo-gpus.yaml", 2, GPUS[0], (2,))],
    4: [("one-node/colocated-4-gpus.yaml", 4, GPUS[0], (8,))],
    8: [
        ("one-node/qwen3-30b-a3b.yaml", 8, H200, (8,)),
        ("one-node/qwen3-30b-a3b-lora.yaml", 8, GPUS[0], (8,)),
        ("one-node/colocated-8-gpus.yaml", 8, GPUS[0], (16,)),
    ],
    16: [("cluster/qwen3-30b-a3b.yaml", 8, GPUS[0], (8, 8)), ("cluster/qwen3-30b-a3b-lora-tools.yaml", 8, GPUS[0], (8, 8))],
    128: [("cluster/qwen3-235b-a22b.yaml", 8, GPUS[0], (8, 8)), ("cluster/qwen3-235b-a22b-lora.yaml", 8, GPUS[0], (8, 8))],
}
EVERY = [pytest.param(total, *setup, id=f"{total}-{setup[0]}") for total, setups in SETUPS.items() for setup in setups]


def configured(name: str, *overrides: str) -> tuple[Config, Mapping[str, Any]]:
    config = load(EXAMPLES / name, overrides)
    return config, budget.hf_of(config, None if config.model.make else MODELS / f"{config.model.path.name}.json")


def machine(config: Config, hf: Mapping[str, Any], count: int, card: GpuFacts) -> Machine:
    """A healthy node with so many cards, examined for a configuration."""
    found = tuple(replace(card, index=index, uuid=f"GPU-{index:08x}") for index in range(count))
    seen = {f"{who}__torch__shown": shown(*found) for who in ("trainer", "engine")}
    return but(NODE, nvidia__gpus=found, nvidia__on_bus=count, run=PlannedRun(config, hf), **seen)


@pytest.mark.parametrize(("total", "name", "gpus_each", "card", "processes"), EVERY)
def test_it_starts_but_not_with_a_gpu_too_few(total: int, name: str, gpus_each: int, card: GpuFacts, processes: tuple[int, ...]) -> None:
    config, hf = configured(name)
    several = config.cluster.network != "loopback"
    nodes = config.cluster.trainer_nodes + config.cluster.engine_nodes if several else 1
    assert nodes * gpus_each == total
    placed = [devices.place(wanted, gpus_each) for wanted in devices.wanted(config, several)]
    for found, number in zip(placed, processes, strict=True):
        taken = [*found.trainer, *(device for one in found.engines for device in one)]
        assert len(taken) == number
        assert len(set(taken)) == (number if not config.in_turn else total)
        assert bool(found.shared) == config.in_turn
    assert preflight.judge(machine(config, hf, gpus_each, card)) == ()
    with pytest.raises(UserError) as caught:
        preflight.judge(machine(config, hf, gpus_each - 1, card))
    assert caught.value.what == ("placement of node01" if total > 1 else "GPUs of node01")


def test_a_machine_without_gpus_is_not_examined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setattr(preflight, "gather", lambda config: pytest.fail("it looked"))
    config, _ = configured("demo.yaml")
    assert preflight.check(config) == ()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert preflight.check(config) == ()


def test_an_engine_that_joins_has_gpus_of_its_machine() -> None:
    config, _ = configured("cluster/qwen3-30b-a3b.yaml")
    gpus.check(config, 1, 8)
    with pytest.raises(ConfigError, match=r"GPUs of this machine: got 8, expected at least 12: .* 3 x 4 \(engines\.tp\)"):
        gpus.check(config, 2, 8)
    over, _ = configured("cluster/qwen3-30b-a3b.yaml", "engines.nodes=2", "cluster.network=ib0")
    assert list(gpus.check(over, 3, 8)) == [6, 7]
    with pytest.raises(ConfigError, match=r"GPUs of this machine: got 8, expected at least 10: .* 5 x 2 \(engines\.tp / engines\.nodes\)"):
        gpus.check(over, 4, 8)


def test_engines_of_an_evaluation_have_all_gpus_of_a_machine_to_themselves() -> None:
    """And, without a trainer, no second copy of the weights beside the KV cache."""
    config, hf = configured("cluster/qwen3-30b-a3b.yaml", "engines.count=2", "engines.tp=4")
    found = evaluate.alone(config, config.model.path, Path("logs"))
    assert [gpus.check(found, index, 8, alone=True) for index in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert budget.engine_arguments(found, hf, 80.0) == ()
    with pytest.raises(ConfigError, match="GPUs of this machine"):
        gpus.check(found, 1, 7, alone=True)


def option(arguments: tuple[str, ...], name: str) -> float:
    return float(arguments[arguments.index(name) + 1])


@pytest.mark.parametrize(
    ("name", "gpu_gb"),
    [("demo-gpu.yaml", 24.0), ("demo-gpu.yaml", 150.8), ("one-node/qwen3-30b-a3b.yaml", 141.0), ("cluster/qwen3-30b-a3b.yaml", 80.0)],
)
def test_what_bounds_an_engine_leaves_room_for_what_comes_besides(name: str, gpu_gb: float) -> None:
    config, hf = configured(name, "engines.max_total_tokens=null")
    arguments = budget.engine_arguments(config, hf, gpu_gb)
    tokens, fraction = int(option(arguments, "--max-total-tokens")), option(arguments, "--mem-fraction-static")
    given = config.model_copy(update={"engines": config.engines.model_copy(update={"max_total_tokens": tokens})})
    held = budget.of_run(given, hf, gpu_gb)
    assert held.refusals == ()
    asleep = held.phases[DeviceTurn.GENERATING][0].total if held.phases else 0
    room = budget.memory.usable(gpu_gb) - asleep
    static = sum(held.engine.parts.get(part, 0) for part in ("weights", "adapters", "derived", "KV cache"))
    besides = held.engine.total - static
    assert held.engine.total <= room < held.engine.total + budget.memory.kv_bytes(hf, models.engine_parallel(config), "bfloat16")
    # Whether a trainer on the same GPU has not begun or sleeps when the engine starts: the cache finds its room, and so does what comes
    # after it.
    for free in (gpu_gb * 1e9 - asleep, gpu_gb * 1e9):
        assert static < fraction * free
    assert fraction * room + besides <= room + 1
    command = engine_process.command(config, 0, "127.0.0.1", 31000, False, 0, None, arguments)
    assert command[-4:] == ["--max-total-tokens", str(tokens), "--mem-fraction-static", f"{fraction:g}"]


def test_what_the_user_gives_an_engine_is_not_given_again() -> None:
    config, hf = configured("demo-gpu.yaml", "engines.max_total_tokens=9000")
    assert budget.engine_arguments(config, hf, 80.0)[::2] == ("--mem-fraction-static",)
    config, hf = configured("demo-gpu.yaml", 'engines.args=["--mem-fraction-static","0.3"]', "engines.max_total_tokens=null")
    assert budget.engine_arguments(config, hf, 80.0)[::2] == ("--max-total-tokens",)
    config, hf = configured("demo-gpu.yaml", 'engines.args=["--mem-fraction-static=0.3","--max-total-tokens=7000"]')
    assert budget.engine_arguments(config, hf, 80.0) == ()
    config, hf = configured("cluster/qwen3-235b-a22b.yaml", "engines.max_total_tokens=null")
    assert budget.engine_arguments(config, hf, 80.0) == (), "alone, and without staging: SGLang's own choice"


def test_without_room_for_a_second_copy_nothing_is_staged() -> None:
    config, hf = configured("cluster/qwen3-30b-a3b.yaml", "engines.tp=2", "engines.ep=2", "engines.max_total_tokens=null")
    assert not budget.stages(config, hf, 80.0)
    assert budget.engine_arguments(config, hf, 80.0) == ()
    assert budget.of_run(config, hf, 80.0).engine.parts.get("staging") is None
    assert budget.stages(config, hf, 141.0)
    assert budget.engine_arguments(config, hf, 141.0)
    assert budget.stages(config, hf, 80.0, cpu=True)
    in_turn, hf = configured("demo-gpu.yaml")
    assert not budget.stages(in_turn, hf, 80.0)


@pytest.mark.parametrize(
    ("name", "overrides", "gpu_gb", "got"),
    [
        ("cluster/qwen3-30b-a3b.yaml", ("engines.tp=2", "engines.ep=2"), 40.0, " GB of an engine ("),
        ("demo-gpu.yaml", (), 15.5, "16.8 GB of the trainer and an engine ("),
    ],
)
def test_what_does_not_fit_is_refused(name: str, overrides: tuple[str, ...], gpu_gb: float, got: str) -> None:
    config, hf = configured(name, *overrides)
    with pytest.raises(ConfigError, match="memory of a GPU: got ") as caught:
        budget.engine_arguments(config, hf, gpu_gb)
    assert got in str(caught.value)


def test_engines_begin_behind_the_trainer_of_their_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def base(name: str, index: int, *overrides: str) -> int:
        command = engine_process.command(configured(name, *overrides)[0], index, "127.0.0.1", 31000, False, 0, None)
        return int(command[command.index("--base-gpu-id") + 1])

    monkeypatch.setattr(engine_process, "_GPUS", tmp_path)
    monkeypatch.delenv("ASYNCMOE_HOST", raising=False)
    assert base("one-node/qwen3-30b-a3b.yaml", 0) == 6
    assert [base("cluster/qwen3-30b-a3b.yaml", index) for index in (0, 1)] == [0, 4]
    assert base("demo-gpu.yaml", 0) == 0
    assert base("demo-gpus.yaml", 0) == 1
    assert base("demo-gpus.yaml", 1, "engines.first_gpu=3") == 4
    monkeypatch.setenv("ASYNCMOE_HOST", "10.0.0.3")
    assert base("demo-gpus.yaml", 0) == 0, "other machines reach this one: the trainer is on one of its own"


def test_kernels_begin_in_order_where_tensor_parallelism_counts_on_it(caplog: pytest.LogCaptureFixture) -> None:
    def connections(tp: int, **given: str) -> str | None:
        run = load(EXAMPLES / "demo.yaml", ["trainer.ep=1", f"trainer.tp={tp}"])
        return environment.before_cuda(run.trainer, given).get(environment.CONNECTIONS)

    assert connections(1) is None
    assert connections(2) == "1"
    assert not caplog.records
    assert connections(2, **{environment.CONNECTIONS: "8"}) == "8"
    assert "unset the variable" in caplog.text


def test_torchs_memory_grows_in_place_unless_the_user_chose() -> None:
    run = load(EXAMPLES / "demo-gpu.yaml")
    assert environment.before_cuda(run.trainer, {}) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name, value in (("PYTORCH_ALLOC_CONF", ""), ("PYTORCH_CUDA_ALLOC_CONF", "backend:native"), ("LD_PRELOAD", "torch_memory_saver.so")):
        assert environment.before_cuda(run.trainer, {name: value}) == {}


def test_blocks_of_float8_have_float32_scales_on_hopper() -> None:
    def scales(precision: str, capability: tuple[int, int], **given: str) -> str | None:
        cuda = mock.patch.multiple("torch.cuda", is_available=lambda: True, get_device_capability=lambda _: capability)
        with mock.patch.dict(os.environ, given, clear=True), cuda:
            environment.prepare(load(EXAMPLES / "demo-gpu.yaml", [f"trainer.precision={precision}"]))
            return os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")

    assert scales("fp8", (9, 0)) == "1"
    assert scales("fp8", (9, 0), NVTE_FP8_BLOCK_SCALING_FP32_SCALES="0") == "0"
    assert scales("fp8", (10, 0)) is scales("null", (9, 0)) is None


# ---------------------------------------------------------------- machines with different GPUs


H100 = GPUS[0]
T400 = GpuFacts(0, "NVIDIA T400 4GB", 4096, 4, "Default", "7.5")
T4 = GpuFacts(0, "Tesla T4", 15360, 4, "Default", "7.5")
V100 = GpuFacts(0, "Tesla V100-SXM2-32GB", 32768, 4, "Default", "7.0")
A100 = GpuFacts(0, "NVIDIA A100-SXM4-80GB", 81920, 4, "Default", "8.0")
GB10 = GpuFacts(0, "NVIDIA GB10", 0, 4, "Default", "12.1")
PROHIBITED, EXCLUSIVE = replace(H100, compute_mode="Prohibited"), replace(H100, compute_mode="Exclusive_Process")
BUSY = replace(H100, used_mib=60000)
ONE, TWO = "demo-gpu.yaml", "demo-gpus.yaml"
FULL = "one-node/qwen3-30b-a3b.yaml"


def node(name: str, found: list[GpuFacts], *overrides: str, sees: tuple[int, ...] | None = None, **changes: Any) -> Machine:
    """A node with these cards, examined for an example; `sees`: nvidia-smi's numbers of those that torch sees, in CUDA's order."""
    numbered = tuple(replace(gpu, index=index, uuid=f"GPU-{index:08x}") for index, gpu in enumerate(found))
    seen = numbered if sees is None else [numbered[number] for number in sees]
    base = but(machine(*configured(name, *overrides), len(found), H100), nvidia__gpus=numbered, trainer__torch__shown=shown(*seen))
    return but(base, **changes) if changes else base


def instance(gibibytes: int) -> tuple[GpuFacts, ...]:
    """What torch says of an instance of a GPU."""
    return (GpuFacts(None, "NVIDIA H100 80GB HBM3 MIG 3g.40gb", gibibytes << 10, capability="9.0", uuid="GPU-31c1"),)


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
    (lambda: node(ONE, [EXCLUSIVE]), "compute mode of GPU 0 is Exclusive_Process, and the trainer and an engine use GPU 0 in turn"),
    (lambda: node(ONE, [GB10], trainer__torch__shown=instance(10)), "memory of GPU 0: 16.8 GB of the trainer and an engine ("),
    (lambda: node(ONE, [H100], engine__packages={"torch-memory-saver": None}), "torch-memory-saver, by which engines release memory"),
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
