"""Print facts about a Python environment: its Python runs the text of this file, which at its top may import only the standard library.

It prints each field of `facts.PythonFacts` as a JSON object on a line, after `MARK`, as soon as it is known, because an import may crash
or hang the process. The field `step` names the next operation.

usage: python - PACKAGE...      (the packages whose versions to report)
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "asyncmoe doctor: "
"""Prefix of our lines; imports print others."""


def main(names: Iterable[str]) -> None:
    """Print all facts, last those whose imports are most likely to crash."""
    packages = installed(names)
    say(version=".".join(map(str, sys.version_info[:3])), packages=packages)
    looks = [("loading asyncmoe's extension", extension), ("opening NCCL", nccl), ("opening libcuda", cuda_driver)]
    if "torch" in packages:
        looks.append(("importing torch", torch))
        looks += [("looking for optional kernels", kernels)] if importlib.util.find_spec("asyncmoe") else []
    if "transformer-engine" in packages:
        looks.append(("importing transformer_engine.pytorch", transformer_engine))
    for step, look in looks:
        say(step=step)
        say(**{look.__name__: look()})
    say(step=None)


def say(**fields: Any) -> None:
    print(f"{MARK}{json.dumps(fields)}", flush=True)


def installed(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed packages among `names`."""
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def extension() -> dict[str, Any]:
    """Locate asyncmoe and import its extensions."""
    spec = importlib.util.find_spec("asyncmoe")
    if spec is None or spec.origin is None:
        return {"package": None, "trouble": "asyncmoe is not found"}
    found: dict[str, Any] = {"package": str(Path(spec.origin).resolve().parent)}
    try:
        trajectory, reshard = (importlib.import_module(f"asyncmoe.{part}._C") for part in ("trajectory", "reshard"))
    except ImportError as error:
        return {**found, "trouble": str(error)}
    built = [getattr(one, "SOURCES", "") for one in (reshard, trajectory)]
    archs = [arch for arch in getattr(reshard, "ARCHITECTURES", "").split(";") if arch]
    return {**found, "cuda": reshard.CUDA, "built_from": built, "architectures": archs}


def nccl() -> dict[str, Any]:
    """Open libnccl as the transport does, and return its version."""
    try:
        reshard, nccl = (importlib.import_module(f"asyncmoe.reshard.{part}") for part in ("_C", "nccl"))
        return {"version": reshard.nccl_origin(nccl.find_nccl())[0]}
    except ImportError:
        return {}
    except RuntimeError as error:
        return {"trouble": str(error)}


def cuda_driver() -> int | None:
    """Return the newest CUDA version that the driver supports."""
    version = ctypes.c_int()
    with suppress(OSError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value
    return None


def torch() -> dict[str, Any]:
    """Return torch's build and, for a CUDA build, the GPUs that it sees."""
    module = importlib.import_module("torch")
    found = {"version": module.__version__, "cuda": module.version.cuda}
    if module.version.cuda is None:
        return found
    try:
        module.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return {**found, "trouble": str(error).strip().split("\n")[0]}
    count = module.cuda.device_count()
    apart = [(i, j) for i in range(count) for j in range(i) if not module.cuda.can_device_access_peer(i, j)]
    return {**found, "apart": apart, "shown": [shown(module.cuda.get_device_properties(device)) for device in range(count)]}


def shown(found: Any) -> dict[str, Any]:
    """Describe a GPU or MIG instance that CUDA shows, whose memory nvidia-smi may not know."""
    told = {"index": None, "name": found.name, "memory_mib": found.total_memory >> 20}
    return {**told, "capability": f"{found.major}.{found.minor}", "uuid": f"GPU-{found.uuid}"}


def kernels() -> dict[str, Any]:
    """Return the optional kernels as the trainer would find them, or raise what it would raise."""
    return dataclasses.asdict(importlib.import_module("asyncmoe.platform.kernels").detect())


def transformer_engine() -> bool:
    """Import Transformer Engine."""
    importlib.import_module("transformer_engine.pytorch")
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
