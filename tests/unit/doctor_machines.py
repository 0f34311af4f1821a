"""Machines for the doctor's checks: a node with eight H100 in perfect health, and a laptop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncmoe.doctor.facts import Extension, GpuFacts, Machine, Nccl, Nvidia, PythonFacts, Torch
from asyncmoe.platform.kernels import Kernels
from asyncmoe.rpc.nics import Nics

SOURCES = ("5e" * 32, "ca" * 32)
REQUIREMENTS = {
    "torch": ">=2.6",
    "megatron-core": ">=0.16.1,<0.20",
    "transformers": ">=5.12",
    "tokenizers": "",
    "transformer-engine": ">=2.4",
    "sglang": "==0.5.23",
}
TRAIN = ("torch", "megatron-core", "transformers", "tokenizers")
TRAIN_PACKAGES = {
    "torch": "2.9.0+cu128",
    "megatron-core": "0.16.1",
    "transformers": "5.19.0",
    "tokenizers": "0.23.2",
    "transformer-engine": "2.8.0",
}

GPUS = tuple(GpuFacts(index, "NVIDIA H100 80GB HBM3", 81559, 4, "Default", "9.0", uuid=f"GPU-{index:08x}") for index in range(8))


def shown(*gpus: GpuFacts) -> tuple[GpuFacts, ...]:
    """torch's facts about these."""
    return tuple(GpuFacts(None, gpu.name, gpu.memory_mib, capability=gpu.capability, uuid=gpu.uuid) for gpu in gpus)


TRAINER = PythonFacts(
    executable="/env/bin/python",
    version="3.11.7",
    packages=TRAIN_PACKAGES,
    extension=Extension("/src/asyncmoe", cuda=True, built_from=SOURCES),
    nccl=Nccl(22703),
    cuda_driver=12080,
    torch=Torch("2.9.0+cu128", "12.8", shown=shown(*GPUS)),
    kernels=Kernels(cuda=True, capability=(9, 0), transformer_engine=(2, 8, 0)),
    transformer_engine=True,
)
_SERVES = {"sglang": "0.5.23", "torch": "2.9.0+cu128", "torch-memory-saver": "0.0.10"}
ENGINE = replace(TRAINER, executable="/engine/bin/python", packages=_SERVES, transformer_engine=False)
NODE = Machine(
    host="node01",
    requirements=REQUIREMENTS,
    train=TRAIN,
    sources=SOURCES,
    trainer=TRAINER,
    engine=ENGINE,
    nvidia=Nvidia(8, "570.86.15", GPUS),
    nics=Nics({"mlx5_0:1": "ACTIVE", "mlx5_1:1": "ACTIVE"}, ("mlx5_0", "mlx5_1")),
    run=None,
)

_CPU_TORCH = Torch("2.9.0+cpu")
_CPU_EXTENSION = Extension("/src/asyncmoe", built_from=SOURCES)
_NO_NCCL = Nccl(None, "libnccl.so.2: cannot open shared object file: No such file or directory")
LAPTOP = replace(
    NODE,
    host="laptop",
    trainer=replace(
        TRAINER,
        packages={name: version for name, version in TRAIN_PACKAGES.items() if name != "transformer-engine"},
        torch=_CPU_TORCH,
        extension=_CPU_EXTENSION,
        nccl=_NO_NCCL,
        cuda_driver=None,
        kernels=Kernels(),
        transformer_engine=False,
    ),
    engine=replace(ENGINE, torch=_CPU_TORCH, extension=_CPU_EXTENSION, nccl=_NO_NCCL, cuda_driver=None),
    nvidia=Nvidia(trouble="there is no nvidia-smi"),
    nics=Nics(),
)


def but(value: Any, **changes: Any) -> Any:
    """A copy of nested facts with some changed; `trainer__torch__cuda=None` goes down, and `{...}` adds to a mapping."""
    for path, new in changes.items():
        name, _, rest = path.partition("__")
        old = getattr(value, name)
        if rest:
            new = but(old, **{rest: new})
        elif isinstance(new, dict):
            new = {key: item for key, item in {**old, **new}.items() if item is not None}
        value = replace(value, **{name: new})
    return value
