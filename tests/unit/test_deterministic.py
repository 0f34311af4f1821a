"""Which runs are deterministic, what that sets and refuses, and what else the bits of a step depend on."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from asyncmoe.errors import ConfigError
from asyncmoe.flight import circumstances
from asyncmoe.trainer.model import deterministic, environment
from tests.configs import minimal

CARD = {
    "cuda.is_available": lambda: True,
    "cuda.get_device_capability": lambda: (9, 0),
    "cuda.get_device_name": lambda: "NVIDIA H200",
    "cuda.nccl.version": lambda: (2, 30, 4),
    "version.cuda": "13.0",
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CARD.items():
        monkeypatch.setattr(f"torch.{name}", value)


@pytest.fixture
def environ() -> Iterator[None]:
    """The environment and torch's switch are left as they were."""
    with mock.patch.dict(os.environ):
        yield
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def started(asked: bool | None) -> tuple[bool, bool, bool]:
    """Whether torch and cuBLAS are deterministic, and whether torch fills new memory."""
    environment.prepare(minimal(run={"dir": "run", "steps": 1, "deterministic": asked}))
    fills: bool = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), "CUBLAS_WORKSPACE_CONFIG" in os.environ, fills


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize(("asked", "on_cpu", "on_gpu"), [(None, True, False), (True, True, True), (False, False, False)])
def test_runs_are_deterministic_on_cpus_unless_and_on_gpus_if_the_user_says_so(
    asked: bool | None, on_cpu: bool, on_gpu: bool, request: pytest.FixtureRequest
) -> None:
    assert started(asked) == (on_cpu, False, not on_cpu)
    torch.set_deterministic_debug_mode("default")
    request.getfixturevalue("gpu")
    assert started(asked) == (on_gpu, on_gpu, not on_cpu)


def test_variables_that_contradict_are_refused_by_name() -> None:
    chosen = deterministic.variables({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_NVLS_ENABLE": "0"})
    assert chosen["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert chosen["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == chosen["NCCL_NVLS_ENABLE"] == "0"
    for name in chosen:
        with pytest.raises(ConfigError) as refused:
            deterministic.variables({name: "2"})
        assert refused.value.what == name
        assert f"{name}=2" in str(refused.value)


def test_a_dispatcher_without_an_order_is_refused() -> None:
    flex = {"ranks": 2, "ep": 2, "megatron": {"moe_token_dispatcher_type": "flex"}}
    minimal(trainer=flex)
    with pytest.raises(ConfigError, match=r"moe_token_dispatcher_type: got flex, expected alltoall because run\.deterministic is true"):
        minimal(run={"dir": "run", "steps": 1, "deterministic": True}, trainer=flex)


def test_circumstances_are_sizes_threads_processor_versions_and_code_but_no_place() -> None:
    trainer = {"ranks": 8, "tp": 2, "ep": 2, "cp": 2, "dtype": "bfloat16"}
    found = circumstances.circumstances(minimal("there/run", "there/model", trainer=trainer), {"own:loss": "ab12"})
    sizes = {name: found.pop(f"trainer.{name}") for name in ("ranks", "tp", "pp", "vpp", "ep", "etp", "cp")}
    assert sizes == {"ranks": "8", "tp": "2", "pp": "1", "vpp": "1", "ep": "2", "etp": "1", "cp": "2"}
    assert not [name for name in found if name.startswith("trainer.")]
    assert (found["data-parallel ranks"], found["optimizer"], found["dtype"], found["plug-in own:loss"]) == (
        "2",
        "sharded",
        "bfloat16",
        "ab12",
    )
    assert found["threads"] == str(torch.get_num_threads())
    assert found["processor"].endswith(f", {torch.backends.cpu.get_cpu_capability()}")
    assert {"torch", "megatron-core", "numpy", "python", "code", "extensions"} <= found.keys()
    places = (socket.gethostname(), str(Path.cwd()), "there", str(os.getpid()))
    assert not [value for value in found.values() if any(place in value for place in places)]


@pytest.mark.usefixtures("gpu")
def test_circumstances_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text("BogoMIPS: 2000\n")
    (tmp_path / "driver").write_text("580.95.05\n")
    monkeypatch.setattr(circumstances, "_CPU", tmp_path / "cpuinfo")
    monkeypatch.setattr(circumstances, "_DRIVER", tmp_path / "driver")
    found = circumstances.circumstances(minimal(), {})
    assert found["dtype"] == "bfloat16"
    assert found["processor"].startswith(f"{platform.machine()}, ")
    expected = {"GPU": "NVIDIA H200, capability 9.0", "driver": "580.95.05", "CUDA": "13.0", "NCCL": "2.30.4"}
    assert expected.items() <= found.items()


def test_changed_code_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circumstances, "_CODE", tmp_path)
    (tmp_path / "a").mkdir()

    def digests() -> tuple[str, str]:
        found = circumstances.circumstances(minimal(), {})
        return found["code"], found["extensions"]

    nothing = digests()
    (tmp_path / "a" / "b.py").write_text("x = 1")
    code, extensions = digests()
    assert (code != nothing[0], extensions) == (True, nothing[1])
    (tmp_path / "_C.so").write_bytes(b"1")
    assert (digests()[0], digests()[1] != extensions) == (code, True)
    (tmp_path / "a" / "b.py").rename(tmp_path / "b.py")
    assert digests()[0] != code
