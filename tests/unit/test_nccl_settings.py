"""NCCL settings shared by trainer and engines, and the effect of differing settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncmoe.engines.sglang import process
from asyncmoe.launch.ray import planning
from asyncmoe.launch.torchrun import trainer_environment
from asyncmoe.rpc import nccl_settings
from tests.configs import minimal

CUMEM = "NCCL_CUMEM_ENABLE"


@pytest.mark.parametrize(("given", "form"), [({}, "0"), ({CUMEM: "1"}, "1"), ({CUMEM: "0"}, "0"), ({"NCCL_CONF_FILE": "nccl.conf"}, "1")])
def test_trainer_and_engines_have_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], form: str) -> None:
    """SGLang leaves alone what is given (`_set_envs_and_config`), and a trainer rank adds its part when it starts. On one machine and with
    SLURM all have the environment of the launcher, with Ray the part of it that all nodes share."""
    (tmp_path / "nccl.conf").write_text(f"# of this machine\n{CUMEM}=1\nNCCL_BUFFSIZE=1048576\n")
    monkeypatch.chdir(tmp_path)
    for name, value in {**dict.fromkeys(name for name in os.environ if name.startswith("NCCL_")), **given}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    for started in (dict(os.environ), planning.environment(minimal(), "10.0.0.4", ["10.0.0.3"], os.environ)):
        trainer = started | trainer_environment(started)
        trainer |= nccl_settings.set_defaults(trainer)
        engine = started | process.environment(minimal(), 0)
        assert nccl_settings.shared(trainer) == nccl_settings.shared(engine) == nccl_settings.shared(started)
        assert trainer[CUMEM] == engine[CUMEM] == form


def test_the_environment_comes_before_files_and_what_describes_a_machine_is_left_out(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_P2P_LEVEL=SYS\nNCCL_IB_HCA=mlx5_0\n\nNCCL_ALGO=Ring\n")
    environ = {"HOME": str(tmp_path), "NCCL_ALGO": "Tree", "NCCL_DEBUG_FILE": "x", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_settings.shared(environ) == {CUMEM: "0", "NCCL_P2P_LEVEL": "SYS", "NCCL_ALGO": "Tree"}
    assert nccl_settings.shared({"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "none")}) == {CUMEM: "0"}
