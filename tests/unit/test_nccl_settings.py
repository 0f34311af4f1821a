"""The settings of NCCL that trainer and engines share, and what a library makes of ranks that do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_nccl import built
from reshard_gpu_fakes import FakeGpu

from asyncmoe import config as configuration
from asyncmoe.engines.sglang import process
from asyncmoe.errors import TransferError
from asyncmoe.launch.ray import planning
from asyncmoe.launch.torchrun import trainer_environment
from asyncmoe.reshard.nccl import make_unique_id
from asyncmoe.reshard.nccl_transport import NcclTransport
from asyncmoe.rpc import nccl_settings

CUMEM = "NCCL_CUMEM_ENABLE"
LOOK = f'import os, sys; sys.addaudithook(lambda _, args: args[:1] == ("torch",) and os._exit(40 + int(os.environ["{CUMEM}"])))'
RANK = 'import runpy; runpy.run_module("asyncmoe.trainer", run_name="__main__", alter_sys=True)'
CONFIG = configuration.parse({"model": {"path": "m"}, "task": {"kind": "arithmetic"}, "run": {"dir": "r", "steps": 1}})


def exchange(library: str, *ranks: Mapping[str, str]) -> None:
    """Two ranks of a communicator, each with an environment of its own as it joins, send each other a message."""
    unique, joining = make_unique_id(library), list[Future[NcclTransport]]()
    waits, all_there = threading.Event(), threading.Event()

    def watch() -> None:
        """Until all are there a rank that waits does nothing, so that it does not read the environment while that changes."""
        waits.set()
        all_there.wait(5.0)

    def send(end: NcclTransport) -> None:
        end.exchange([(1 - end.rank, end.empty(8))], [(1 - end.rank, end.empty(8))], 5.0)

    with ThreadPoolExecutor(len(ranks)) as threads:
        for rank, environ in enumerate(ranks):
            with pytest.MonkeyPatch.context() as given:
                given.delenv(CUMEM, raising=False)
                for name, value in environ.items():
                    given.setenv(name, value)
                how: dict[str, Any] = {"timeout_s": 5.0, "library": library, "gpu": FakeGpu(), "watch": watch}
                joining.append(threads.submit(partial(NcclTransport, rank, len(ranks), unique, 0, **how)))
                assert waits.wait(5.0) if rank + 1 < len(ranks) else joining[-1].result()
        all_there.set()
        list(threads.map(send, [end.result() for end in joining]))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the stand-in with")
    monkeypatch.setenv("FAKE_NCCL_MAIL", "1")
    return built(tmp_path / "libnccl.so.2")


@pytest.mark.parametrize(("ours", "theirs"), [({}, {CUMEM: "0"}), ({CUMEM: "0"}, {CUMEM: "1"})])
def test_ranks_that_hand_over_memory_in_two_forms_fail(library: str, ours: dict[str, str], theirs: dict[str, str]) -> None:
    exchange(library, ours, ours)
    with pytest.raises(TransferError, match="unhandled cuda error"):
        exchange(library, ours, theirs)


@pytest.mark.parametrize(("given", "form"), [({}, "0"), ({CUMEM: "1"}, "1"), ({CUMEM: "0"}, "0"), ({"NCCL_CONF_FILE": "nccl.conf"}, "1")])
def test_trainer_and_engines_of_every_launcher_have_the_same(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], form: str
) -> None:
    """SGLang leaves alone what is given (`_set_envs_and_config`), and a trainer rank adds its part when it starts. On one machine and with
    SLURM all have the environment of the launcher, with Ray the part of it that all nodes share."""
    (tmp_path / "nccl.conf").write_text(f"# of this machine\n{CUMEM}=1\nNCCL_BUFFSIZE=1048576\n")
    monkeypatch.chdir(tmp_path)
    for name, value in {**dict.fromkeys(name for name in os.environ if name.startswith("NCCL_")), **given}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    for started in (dict(os.environ), planning.environment(CONFIG, "10.0.0.4", ["10.0.0.3"], os.environ)):
        trainer = started | trainer_environment(started)
        trainer |= nccl_settings.set_defaults(trainer)
        engine = started | process.environment(CONFIG, 0)
        assert nccl_settings.shared(trainer) == nccl_settings.shared(engine) == nccl_settings.shared(started)
        assert trainer[CUMEM] == engine[CUMEM] == form
        exchange(library, trainer, engine)


@pytest.mark.parametrize("given", [{}, {CUMEM: "1"}])
def test_a_rank_has_its_settings_before_torch_loads_nccl(tmp_path: Path, given: dict[str, str]) -> None:
    """Of which a process keeps what it has read first (2.30: src/misc/param.cc)."""
    words = ("examples/demo.yaml", f"run.dir={tmp_path}")
    environ = {**{name: value for name, value in os.environ.items() if name != CUMEM}, **given}
    done = subprocess.run([sys.executable, "-c", f"{LOOK}; {RANK}", *words], env=environ, capture_output=True, timeout=60, check=False)
    assert done.returncode == 40 + int(given.get(CUMEM, "0")), done.stderr


def test_the_environment_comes_before_files_and_what_describes_a_machine_is_left_out(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_P2P_LEVEL=SYS\nNCCL_IB_HCA=mlx5_0\n\nNCCL_ALGO=Ring\n")
    environ = {"HOME": str(tmp_path), "NCCL_ALGO": "Tree", "NCCL_DEBUG_FILE": "x", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_settings.shared(environ) == {CUMEM: "0", "NCCL_P2P_LEVEL": "SYS", "NCCL_ALGO": "Tree"}
    assert nccl_settings.shared({"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "none")}) == {CUMEM: "0"}
