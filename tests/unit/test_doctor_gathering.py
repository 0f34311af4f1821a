"""The doctor on real problems: commands that fail or hang, drivers that do not respond, broken packages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import asyncmoe
from asyncmoe.doctor import nvidia, programs, pythons
from asyncmoe.doctor.facts import GpuFacts
from asyncmoe.platform.kernels import Kernels
from asyncmoe.reshard import _C

ROOT = Path(asyncmoe.__file__).resolve().parent.parent


def test_a_command_that_is_missing_fails_or_dies() -> None:
    assert programs.run(["no-such-program"], 5).trouble == "there is no no-such-program"
    assert programs.run(["sh", "-c", "echo a; echo b >&2; exit 3"], 5) == programs.Output("a\n", "b\n", "sh ended with status 3")
    assert programs.run(["sh", "-c", "kill -SEGV $$"], 5).trouble == "sh was ended by SIGSEGV"
    assert programs.run(["cat"], 5, "given") == programs.Output("given")


SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) echo '0, NVIDIA H100 80GB HBM3, 81559, 4, Default, 9.0, Disabled, 570.86.15, GPU-0aa'
                 echo '1, NVIDIA H100 80GB HBM3, 81559, 70000, Exclusive_Process, 9.0, [N/A], 570.86.15, GPU-1bb' ;;
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program with that name, first on PATH."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.mark.parametrize(
    ("chosen", "visible"),
    [(None, [0, 1]), ("", []), ("1", [1]), ("1,0", [1, 0]), ("GPU-1,0", [1, 0]), ("1,7,0", [1]), ("MIG-3", []), ("-1", [])],
)
def test_chosen_gpus_are_seen(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, visible: list[int]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.index for gpu in nvidia.look().visible] == visible


def test_nvidia_smi_is_read(nvidia_smi: Path, tmp_path: Path) -> None:
    for name, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"), ("2", "0x8086", "0x030000")):
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(vendor + "\n")
        (tmp_path / "pci" / name / "class").write_text(kind + "\n")
    found = nvidia.look(tmp_path / "pci")
    assert (found.on_bus, found.driver, found.trouble) == (1, "570.86.15", None)
    assert [(gpu.index, gpu.memory_mib, gpu.used_mib, gpu.compute_mode, gpu.mig) for gpu in found.gpus] == [
        (0, 81559, 4, "Default", False),
        (1, 81559, 70000, "Exclusive_Process", False),
    ]


def test_an_nvidia_smi_that_fails_is_told(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9\n")
    found = nvidia.look()
    assert found.driver is None
    assert "ended with status 9: NVIDIA-SMI has failed" in str(found.trouble)
    nvidia_smi.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert nvidia.look().trouble == "nvidia-smi says: No devices were found"


def package(folder: Path, name: str, version: str, code: str) -> Path:
    """A package with its metadata, for a Python with `folder` on its path."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(code)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder / name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on another Python's path, with a torch that imports at once."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}")
    torch = package(tmp_path / "site", "torch", "2.9.0", "from torch import version, cuda\n__version__ = '2.9.0+cu128'\n")
    (torch / "version.py").write_text("cuda = '12.8'\n")
    (torch / "cuda.py").write_text(
        "init = lambda: None\ndevice_count = lambda: 3\ncan_device_access_peer = lambda i, j: (i, j) != (2, 1)\n"
        "is_available = lambda: True\nclass Properties:\n name, total_memory, major, minor, uuid = 'H', 9 << 30, 9, 0, '4e0d'\n"
        "get_device_properties = lambda device: Properties\nget_device_capability = lambda: (9, 0)\n"
    )
    return tmp_path / "site"


def test_a_python_is_looked_into(site: Path) -> None:
    found = pythons.look(sys.executable, ["torch", "no-such-package", "msgspec"], 60)
    assert found.version == ".".join(map(str, sys.version_info[:3]))
    assert found.packages["torch"] == "2.9.0"
    assert set(found.packages) == {"torch", "msgspec"}
    assert found.extension.package == str(ROOT / "asyncmoe")
    assert found.extension.architectures == tuple(filter(None, _C.ARCHITECTURES.split(";")))
    assert bool(found.extension.architectures) == _C.CUDA, "kernels say what they are built for"
    assert (found.torch.version, found.torch.cuda, found.torch.trouble) == ("2.9.0+cu128", "12.8", None)
    assert found.torch.apart == ((2, 1),)
    assert found.torch.shown == (GpuFacts(None, "H", 9 << 10, capability="9.0", uuid="GPU-4e0d"),) * 3
    assert found.kernels == Kernels(cuda=True, capability=(9, 0))
    assert found.unfinished is None
    package(site, "deep_ep", "2.1.0", "assert False, 'no nvcc'")
    assert "importing deep_ep: got AssertionError('no nvcc')" in str(pythons.look(sys.executable, ["torch"], 60).unfinished)


def test_requirements_are_those_of_pyproject_or_else_of_the_installation(tmp_path: Path) -> None:
    here, installed = pythons.declared(ROOT), pythons.declared(tmp_path)
    assert (here.specifiers["sglang"], installed.specifiers["sglang"]) == ("==0.5.23", "==0.5.23")
    assert {"torch", "msgspec"} <= set(here.train)
    assert not {"sglang", "asyncmoe", "pytest", "transformer-engine"} & set(here.train)
    assert "pytest" not in {**here.specifiers, **installed.specifiers}
