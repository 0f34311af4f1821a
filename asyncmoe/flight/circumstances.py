"""What, besides its record, the bits of a training step depend on.

With equal circumstances and `run.deterministic`, a step has the same bits. Hosts, ports, paths and process ids do not matter, and are not
among them.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from asyncmoe.config import Config
from asyncmoe.telemetry import versions

_PACKAGES = ("asyncmoe", "torch", "megatron-core", "transformer-engine", "numpy")
_SIZES = ("ranks", "tp", "pp", "vpp", "ep", "cp")
_CODE = Path(__file__).parents[1]
_CPU, _DRIVER = Path("/proc/cpuinfo"), Path("/sys/module/nvidia/version")


def circumstances(config: Config, plugins: Mapping[str, str]) -> dict[str, str]:
    """Return the circumstances of this process, by names for users; those that start with "trainer." are parallel sizes.

    Args:
        plugins: digest of each of the user's own functions, by its name (`Plugins.sources`).
    """
    trainer = config.trainer
    sizes = {**{name: getattr(trainer, name) for name in _SIZES}, "etp": trainer.expert_tp}
    by_machine = "bfloat16" if torch.cuda.is_available() else "float32"
    return {
        **{f"trainer.{name}": str(size) for name, size in sizes.items()},
        "data-parallel ranks": str(trainer.dp),
        "optimizer": "sharded" if trainer.distributed_optimizer else "whole",
        "dtype": by_machine if trainer.weights_dtype == "auto" else trainer.weights_dtype,
        "threads": str(torch.get_num_threads()),
        **_processor(),
        "python": platform.python_version(),
        **versions.packages(_PACKAGES),
        "code": _digest("*.py"),
        "extensions": _digest("*.so"),
        **{f"plug-in {name}": digest for name, digest in plugins.items()},
    }


def _processor() -> dict[str, str]:
    """Return the type of CPU with the instruction set that torch uses; with a GPU, also its type and libraries."""
    lines = _CPU.read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    found = {"processor": f"{model}, {torch.backends.cpu.get_cpu_capability()}"}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "GPU": f"{torch.cuda.get_device_name()}, capability {major}.{minor}",
            "driver": _DRIVER.read_text().strip() if _DRIVER.is_file() else "unknown",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        }
    return found


def _digest(pattern: str) -> str:
    """Return a digest of this package's files that match, names included."""
    digest = hashlib.sha256()
    for file in sorted(_CODE.rglob(pattern)):
        digest.update(f"{file.relative_to(_CODE)}\0{file.stat().st_size}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
