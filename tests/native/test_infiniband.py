"""The doctor's check of InfiniBand: ports in a folder like that of /sys, and a stand-in for the library that NCCL asks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from asyncmoe.doctor import infiniband
from asyncmoe.rpc import nics

_LIBRARY = """char *all[] = {"mlx5_0", "mlx5_1"}; char **ibv_get_device_list(int *count) { *count = N; return all; }
const char *ibv_get_device_name(char *device) { return device; }"""


@pytest.mark.parametrize(("count", "lost"), [(2, ""), (1, "mlx5_1:1"), (0, "mlx5_0:1, mlx5_1:1"), (None, "mlx5_0:1, mlx5_1:1")])
def test_ports_that_nccl_cannot_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int | None, lost: str) -> None:
    """By the number of adapters that the library lists; None: it is missing."""
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "sys" / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / "sys" / name / "ports" / "1" / "state").write_text("4: ACTIVE\n")
    library = tmp_path / "libibverbs.so.1"
    monkeypatch.setenv("NCCL_IBVERBS_LIB", str(library))
    monkeypatch.setattr("os.geteuid", lambda: 0)  # root can lock memory
    if count is not None:
        compiler = ["gcc", "-shared", "-fPIC", f"-DN={count}", "-xc", "-", "-o", str(library)]
        subprocess.run(compiler, input=_LIBRARY, text=True, check=True, timeout=60)
    found = infiniband.infiniband(there := nics.look(tmp_path / "sys"))
    assert (found.state, f"instead of {lost}," in found.line) == (("warning", True) if lost else ("ok", False)), found
    networks = [nics.network(settings, there) for settings in ({}, {"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "x"})]
    assert networks == ["InfiniBand" if count else "TCP", "TCP", ""]
    assert infiniband.infiniband(nics.look(tmp_path)).state == "not here"
