"""Makes the trainer compute the same bits again, from the same inputs on the same hardware, libraries, layout and threads.

What would otherwise depend on timing, and what decides it here:

- torch's operations whose sums have no order if an index repeats: the backward passes of indexing, `gather` and `index_select`, and
  `scatter_add`. torch's switch orders them, or raises. On CPUs only the backward pass of indexing float32 by a tensor has no order, with
  several threads; the model has none, a user's loss may have.
- Megatron's permutation of rows asks for that switch (transformer/moe/moe_utils.py). Its own `deterministic_mode` stays off: it would
  only replace the embedding by such an indexing, although torch's embedding adds in the order of the rows on CPUs, and of sorted ids on
  GPUs (ATen/native/cuda/Embedding.cu).
- cuBLAS, if streams share a workspace (`CUBLAS_WORKSPACE_CONFIG`); attention and norms of Transformer Engine
  (`NVTE_ALLOW_NONDETERMINISTIC_ALGO`); NCCL's sums inside a switch (`NCCL_NVLS_ENABLE`). Rings and trees of NCCL have an order that
  follows from the message's size and the topology.
- Kernels that torch's compiler chooses by measuring (`TORCHINDUCTOR_DETERMINISTIC`).
- DeepEP places rows in the order in which they arrive: `asyncmoe.config.schema` refuses it.

Models have no dropout, and draw nothing at random after the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from asyncmoe.config import Config
from asyncmoe.errors import ConfigError

_ALLOWED: Mapping[str, tuple[str, ...]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
    "NCCL_NVLS_ENABLE": ("0",),
    "TORCHINDUCTOR_DETERMINISTIC": ("1",),
}
"""Variables that CUDA's libraries and torch read when they start: values with which they are deterministic, the default first."""


def wanted(config: Config) -> bool:
    """Return whether the trainer is deterministic on this machine (`run.deterministic`)."""
    asked = config.run.deterministic
    return not torch.cuda.is_available() if asked is None else asked


def start(config: Config) -> None:
    """Make this process deterministic if `wanted`. Call it before CUDA and the process group are initialised, and before Transformer Engine
    and torch's compiler are imported.

    Raises:
        ConfigError: an environment variable contradicts it.
    """
    if not wanted(config):
        return
    if torch.cuda.is_available():
        os.environ.update(variables(os.environ))
    torch.set_deterministic_debug_mode("error")  # `use_deterministic_algorithms` would import torch's compiler, which takes seconds
    # Memory is not read before it is written, so filling it costs time for nothing.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  torch gives the module this attribute at run time


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to a rank's environment.

    Raises:
        ConfigError: the environment has another value.
    """
    for name, values in _ALLOWED.items():
        if given.get(name, values[0]) not in values:
            got, expected = f"{name}={given[name]} in the environment", f"{' or '.join(values)} because run.deterministic is true"
            raise ConfigError(name, got=got, expected=expected, hint="unset the variable, or leave run.deterministic out")
    return {name: given.get(name, values[0]) for name, values in _ALLOWED.items()}
