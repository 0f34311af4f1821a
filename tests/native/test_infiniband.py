"""The doctor's check of InfiniBand: ports in a folder like that of /sys, and a stand-in for the library that NCCL asks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from asyncmoe.doctor import infiniband

_LIBRARY = """
typedef struct {char name[8];} device;
static device first = {"mlx5_0"}, second = {"mlx5_1"};
static device *all[] = {&first, &second, 0};
device **ibv_get_device_list(int *count) { *count = COUNT; return all; }
const char *ibv_get_device_name(device *one) { return one->name; }
"""


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two adapters with an active port each; as root, for whom memory can be locked."""
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "sys" / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / "sys" / name / "ports" / "1" / "state").write_text("4: ACTIVE\n")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    return tmp_path / "sys"


@pytest.mark.parametrize(("count", "state", "lost"), [(2, "ok", ""), (1, "warning", "mlx5_1:1"), (0, "warning", "mlx5_0:1, mlx5_1:1")])
def test_ports_without_a_driver_are_named(adapters: Path, monkeypatch: pytest.MonkeyPatch, count: int, state: str, lost: str) -> None:
    library = adapters.with_name("libibverbs.so.1")
    command = ["gcc", "-shared", "-fPIC", f"-DCOUNT={count}", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, input=_LIBRARY, text=True, check=True, timeout=60)
    monkeypatch.setenv("NCCL_IBVERBS_LIB", str(library))
    found = infiniband.infiniband(infiniband.look(adapters))
    assert (found.state, f"TCP instead of {lost}" in found.line or not lost) == (state, True), found


def test_a_missing_library_concerns_only_who_has_ports(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IBVERBS_LIB", "libibverbs-missing.so.1")
    found = infiniband.infiniband(infiniband.look(adapters))
    assert (found.state, "libibverbs-missing.so.1: cannot open" in found.found) == ("warning", True), found
    assert "ibverbs-providers" in str(found.hint)
    (adapters / "mlx5_1" / "ports" / "1" / "state").write_text("1: DOWN\n")
    assert infiniband.look(adapters).up == ("mlx5_0:1",)
    assert infiniband.infiniband(infiniband.look(adapters / "none")).state == "not here"
