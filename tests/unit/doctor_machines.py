"""Machines for the doctor's checks: a node with eight H100 and InfiniBand in perfect health, and a laptop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncmoe.config.devices import Wanted
from asyncmoe.doctor.facts import Clock, Disk, Fabric, GpuFacts, Machine, ModelFacts, Network, Nvidia, OnGpus, Port, RunFacts, SystemLimits
from asyncmoe.doctor.python_facts import Extension, Nccl, PythonFacts, Torch

SOURCES = ("5e" * 32, "ca" * 32)
REQUIREMENTS = {
    "python": ">=3.11",
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

TRAINER = PythonFacts(
    executable="/env/bin/python",
    version="3.11.7",
    packages=TRAIN_PACKAGES,
    extension=Extension("/src/asyncmoe", cuda=True, built_from=SOURCES),
    nccl=Nccl("/env/libnccl.so.2", 22703),
    cuda_driver=12080,
    torch=Torch("2.9.0+cu128", "12.8", devices=8),
    transformer_engine=True,
)
ENGINE = replace(TRAINER, executable="/engine/bin/python", packages={"sglang": "0.5.23", "torch": "2.9.0+cu128"}, transformer_engine=False)
GPUS = tuple(GpuFacts(index, "NVIDIA H100 80GB HBM3", 81559, 4, "Default", "9.0") for index in range(8))
LINKS = tuple(tuple("X" if i == j else "NV18" for j in range(8)) for i in range(8))
ON_GPUS = OnGpus((Wanted(ranks=4, engines=2, tp=2, first=4),), "nccl", trainer_bytes=70 * 10**9, engine_bytes=60 * 10**9)
DISK = Disk("/share/run", "/share", "lustre", 10**14, 10**9, checkpoints=0, ahead_s=0.1)
RUN = RunFacts(
    config="run.yaml",
    digest="d1" * 32,
    connections=64,
    checkpoint_bytes=10**12,
    keep_checkpoints=2,
    disk=DISK,
    model=ModelFacts("/share/model", family="qwen3_moe", parameters=30 * 10**9, weights_bytes=60 * 10**9),
    on_gpus=ON_GPUS,
    own={"objective.loss": "my_objective:sapo"},
)

NODE = Machine(
    host="node01",
    asyncmoe="0.1.0 (0123456789ab)",
    kernel="Linux",
    cores=96,
    memory_bytes=2 * 10**12,
    requirements=REQUIREMENTS,
    train=TRAIN,
    sources=SOURCES,
    trainer=TRAINER,
    engine=ENGINE,
    nvidia=Nvidia(8, "570.86.15", GPUS, LINKS),
    fabric=Fabric((Port("mlx5_0", 1, "ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),), peer_memory=True),
    limits=SystemLimits(10**12, 10**12, 1 << 20, 1 << 20, None),
    network=Network(addresses=("10.0.0.1",), interfaces=("lo", "eth0", "ib0")),
    clock=Clock(True, "adjtimex", 0.01),
    run=RUN,
)

_CPU_TORCH = Torch("2.9.0+cpu")
_CPU_EXTENSION = Extension("/src/asyncmoe", built_from=SOURCES)
_NO_NCCL = Nccl("libnccl.so.2", None, "libnccl.so.2: cannot open shared object file: No such file or directory")
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
        transformer_engine=False,
    ),
    engine=replace(ENGINE, torch=_CPU_TORCH, extension=_CPU_EXTENSION, nccl=_NO_NCCL, cuda_driver=None),
    nvidia=Nvidia(trouble="there is no nvidia-smi"),
    fabric=Fabric(),
    run=None,
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
